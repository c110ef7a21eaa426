"""Agreement of the ranks around an update, with ranks as threads of this process."""

import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from partita.comm.collectives import Collectives
from partita.config.schema import Precision
from partita.errors import PartitaError
from partita.optim.consensus import Agreed, Consensus, Culprit, LossScale
from partita.optim.update_message import NO_SCALE, UpdateMessage
from partita.table.mesh_shape import MeshShape
from partita.table.share import NO_COPIES
from tests.kit import seeds
from tests.kit.threads import on_threads

T = TypeVar("T")
DATA = ("data",)
# Four parameters in two buckets; they are the same objects on all ranks, so that ids can be compared.
ROW = SimpleNamespace(separate_axes=(), summed_axes=DATA)
SEGMENT = SimpleNamespace(plan=SimpleNamespace(copies=NO_COPIES, summed_axes=DATA))
MEMBERS = [SimpleNamespace(fqn=name, segment=SEGMENT) for name in "abcd"]


def rank(
    used: str = "",
    num_passes: int = 1,
    leftovers: Sequence[bool] = (False, False),
    scales: Sequence[float] = (),
    wrote: str = "",
    suspect: bool = False,
) -> dict[str, Any]:
    """Return stubs of one rank's reducer and written values after a batch.

    Args:
        used: names of the parameters that got a gradient.
        wrote: names of the parameters that the rank wrote.
    """
    ids = {id(member) for member in MEMBERS if member.fqn in used}
    arrivals = SimpleNamespace(used=ids)
    buckets = [SimpleNamespace(arrivals=arrivals, members=members) for members in (MEMBERS[:3], MEMBERS[3:])]
    reducer = SimpleNamespace(
        buckets=buckets,
        num_passes=num_passes,
        leftovers=lambda: list(leftovers),
        dropped_members=[],
        scales=set(scales),
        finite=SimpleNamespace(is_suspect=suspect),
        join=lambda: None,
    )
    written = SimpleNamespace(sums=dict.fromkeys(wrote, 1), digest=sum(map(ord, wrote)), agreed=lambda: None)
    return {"reducer": reducer, "written": written}


def agreed(ranks: Sequence[dict[str, Any]], ask: Callable[[Consensus], T], loss_scale: float = 1.0) -> list[T]:
    """Call ``ask`` with the consensus of each rank; return the results in rank order."""

    def work(collectives: Collectives) -> T:
        group = collectives.group(DATA)
        runtime: Any = SimpleNamespace(
            gradient_group=group,
            collectives=collectives,
            row=ROW,
            members=lambda: [(None, member) for member in MEMBERS],
            device=torch.device("cpu"),
            buffers=SimpleNamespace(has_changed=lambda: False),
            arguments=SimpleNamespace(checksum=0, describe=lambda: "it"),
            **ranks[group.index],
        )
        return ask(Consensus(runtime, LossScale(Precision(loss_scale=loss_scale), needed=loss_scale != 1.0)))

    return on_threads(MeshShape(data=len(ranks)), work, DATA)


def before(consensus: Consensus) -> Agreed:
    return consensus.before_update("engine.step")


def scale(consensus: Consensus) -> float:
    """Return the loss scale of the gradients, on which ranks agree together with the norm."""
    return consensus.norm((), before(consensus), 7)[1]


@pytest.mark.parametrize("num", [1, 3])
def test_what_one_rank_used_all_update(num: int) -> None:
    others = [rank("a", num_passes=2), rank("cd", leftovers=(False, True))]
    ranks = [rank("b"), *others][-num:]
    used = {id(member) for member in MEMBERS if member.fqn in ("cd" if num == 1 else "abcd")}
    scales = (NO_SCALE,) * num
    assert (
        agreed(ranks, before)
        == [Agreed(1 if num == 1 else 2, [False, True], used, set(), scales, False, False, False)] * num
    )


def test_gradients_have_the_scale_of_whoever_has_some() -> None:
    ranks = [rank(), rank("a", scales=(8.0,)), rank("b", scales=(8.0,))]
    assert agreed(ranks, scale, 64.0) == [8.0] * 3
    assert agreed(ranks, lambda consensus: consensus.gradient_scale(7), 64.0) == [8.0] * 3
    assert agreed([rank(), rank()], scale, 64.0) == [64.0] * 2


@pytest.mark.parametrize("scales", [((8.0,), (1.0,)), ((8.0, 1.0), ()), ((8.0, 1.0), (8.0,))])
def test_several_scales_are_refused_on_all_ranks(scales: Sequence[Sequence[float]]) -> None:
    def refused(consensus: Consensus) -> str:
        with pytest.raises(PartitaError) as raised:
            scale(consensus)
        with pytest.raises(PartitaError, match="several loss scales"):
            consensus.check(before(consensus), 7)
        with pytest.raises(PartitaError, match="several loss scales"):
            consensus.gradient_scale(7)
        return str(raised.value)

    for said in agreed([rank("a", scales=each) for each in scales], refused, 8.0):
        assert said.startswith("step 7: the gradients of this batch came from losses with several loss scales (by ")
        assert "engine.zero_grad()" in said


def test_a_loss_that_was_not_scaled_is_told_once() -> None:
    def told(consensus: Consensus) -> float:
        with pytest.warns(UserWarning, match=r"multiplies by the loss scale \(8\): .* call engine\.backward\(loss\)"):
            found = scale(consensus)
        assert scale(consensus) == found
        return found

    assert agreed([rank("a", scales=(1.0,))], told, 8.0) == [1.0]


def test_ranks_that_wrote_different_values_are_told_where() -> None:
    def compared(consensus: Consensus) -> str:
        with pytest.raises(PartitaError) as raised:
            scale(consensus)
        with pytest.raises(PartitaError, match="rank 2 wrote other values"):
            consensus.compare_written(7)
        return str(raised.value)

    for said in agreed([rank(wrote="a"), rank(wrote="a"), rank(wrote="ab")], compared):
        assert said.startswith(
            "step 7: rank 2 wrote other values into parameters than rank 0, or into other parameters ('b', of 2)"
        )
    assert agreed([rank(wrote="a"), rank(wrote="a")], lambda consensus: before(consensus).num_passes) == [1, 1]


def test_the_norm_is_the_sum_in_rank_order() -> None:
    squares = [[1e16, 1.0], [1.0], [], [-1e16]]

    def norm(index: int) -> Callable[[Consensus], float]:
        parts = [torch.tensor(value, dtype=torch.float64) for value in squares[index]]
        return lambda consensus: consensus.norm(parts, before(consensus), 7)[0]

    def of_rank(consensus: Consensus) -> float:
        return norm(consensus._group.index)(consensus)

    expected = torch.tensor(math.sqrt(((1e16 + 1.0) + 1.0) - 1e16)).item()  # in fp32
    assert agreed([rank() for _ in squares], of_rank) == [expected] * 4
    squares[1] = [math.inf]
    assert agreed([rank() for _ in squares], of_rank) == [math.inf] * 4
    squares[1] = [math.nan]
    assert all(math.isnan(found) for found in agreed([rank() for _ in squares], of_rank))


def test_sums_and_culprits_are_of_all_ranks() -> None:
    ones, halves = torch.ones(2, dtype=torch.float64), torch.tensor([0.5], dtype=torch.float64)
    ranks = [rank(), rank(suspect=True), rank(suspect=True)]
    assert agreed(ranks, lambda consensus: consensus.sums(ones, halves)) == [[3.0, 3.0, 1.5]] * 3

    def culprit(consensus: Consensus) -> Culprit:
        number = 4 - consensus._group.index
        return consensus.culprit(number, f"number {number}")

    assert agreed(ranks, culprit) == [Culprit("number 2", ["1", "2"], "; on rank 1, it")] * 3


@pytest.mark.parametrize(("saved", "expected"), [(1.0, 2.0**16), (512.0, 512.0)])
def test_loss_scales_in_checkpoints_of_earlier_versions(saved: float, expected: float) -> None:
    """These also saved the scale 1 of runs in fp32 and bf16."""
    scale = LossScale(Precision(), needed=True)
    scale.restore({"loss_scale": saved, "good_steps": 7})
    assert scale.value == expected


@pytest.mark.parametrize("scale", [NO_SCALE, 2.0**16])
def test_a_message_is_unpacked_as_it_was(scale: float) -> None:
    generator = random.Random(seeds.chosen())
    for _ in range(20):
        message = UpdateMessage(
            num_passes=generator.randrange(1 << 32),
            num_drops=generator.randrange(1 << 20),
            written=generator.randrange(1 << 32),
            batch=generator.randrange(1 << 24),
            scale=scale,
            has_changed_buffers=generator.random() < 0.5,
            has_hooks=generator.random() < 0.5,
            leftovers=bytes(generator.choices((0, 1), k=3)),
            flags=bytes(generator.choices((0, 1, 2), k=5)),
        )
        assert UpdateMessage.unpack(message.pack(), 3) == message
