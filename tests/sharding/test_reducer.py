"""The gradient reducer without autograd, on ranks in threads: order, zeros for missing gradients, and results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.errors import PartitaError
from partita.sharding.parameter import Member
from partita.sharding.reducer import GradientReducer
from partita.table.mesh_shape import MeshShape
from partita.table.residence import Tier
from partita.table.state_plan import PRESETS, Tiers
from tests.kit.threads import on_threads
from tests.sharding.made import Made, User, made

TWO = MeshShape(data=2)
Work = Callable[[Made, GradientReducer, User], object]


def on_two(work: Work, name: str, num_units: int = 3, accumulate: int = 1, tiers: Tiers = Tiers()) -> None:  # noqa: B008
    """Run ``work`` on two ranks."""

    def run(collectives: Collectives) -> None:
        parts = made(collectives, name, num_units, num_units, tiers)
        work(parts, *parts.reducer(accumulate))

    on_threads(TWO, run, ("data",))


def gradient(member: Member, rank: int) -> Tensor:
    """Return a rank's gradient of a member: integers, so that sums and means of two are exact."""
    numbers = torch.arange(float(member.span.num_elements)).view(member.shape)
    return 2 * numbers + 10 * rank + len(member.fqn)


def brings(reducer: GradientReducer, member: Member, rank: int) -> None:
    """Give a member its gradient, as autograd would, and report it to the reducer."""
    member.param.grad = gradient(member, rank)
    reducer.arrived(member)


def reduced(parts: Made, reducer: GradientReducer, member: Member) -> Tensor:
    """Return this rank's slice of the reduced gradient at its position in ``[numel]`` zeros."""
    bucket = reducer.bucket_of(member)
    assert bucket is not None
    reducer.drain()
    return bucket.gradient_term(member, torch.device("cpu"), is_first=True)


def mean(member: Member) -> Tensor:
    return (gradient(member, 0) + gradient(member, 1)).flatten() / 2


def summed_over_ranks(parts: Made, mine: Tensor) -> Tensor:
    return parts.collectives.group(("data",)).all_reduce(mine)


@pytest.mark.parametrize("name", PRESETS)
def test_means_over_the_ranks(name: str) -> None:
    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank = parts.collectives.mesh.rank
        for member in reversed(parts.members):
            brings(reducer, member, rank)
            assert member.param.grad is None, "it went into its bucket"
        assert reducer.leftovers() == [False] * len(reducer.buckets), "all were launched while they came"
        reducer.end_pass()
        for member in parts.members:
            got = summed_over_ranks(parts, reduced(parts, reducer, member))
            assert torch.equal(got, mean(member)), member.fqn
        assert (user.began, user.used) == (0, []), "no backward went on, and gradients rest"

    on_two(work, name)


@pytest.mark.parametrize("name", PRESETS)
def test_what_the_optimizer_sees(name: str) -> None:
    """The optimizer sees the full mean gradient under ``ddp``, and this rank's slice of it under other presets."""

    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank = parts.collectives.mesh.rank
        for member in reversed(parts.members):
            brings(reducer, member, rank)
        reducer.end_pass()
        reducer.drain()
        reducer.gather({id(member.param) for member in parts.members}, 1.0)
        for member in parts.members:
            bucket = reducer.bucket_of(member)
            assert bucket is not None
            assert bucket.shard is not None
            seen = bucket.optimizer_grad(member, bucket.shard.load())
            if name == "ddp":
                assert seen is not None
                assert torch.equal(seen.flatten(), mean(member))
            elif seen is not None:
                start = next(p.start for p in bucket.layout.pieces[id(member)] if p.row == rank)
                assert torch.equal(seen, mean(member)[start : start + len(seen)])

    on_two(work, name)


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_who_brings_nothing_sends_zeros(name: str) -> None:
    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        if parts.collectives.mesh.rank == 0:
            for member in reversed(parts.members):
                brings(reducer, member, 0)
        reducer.join()
        assert reducer.num_passes == (1 if parts.collectives.mesh.rank else 0)
        reducer.end_micro_batch()
        for member in parts.members:
            got = summed_over_ranks(parts, reduced(parts, reducer, member))
            assert torch.equal(got, gradient(member, 0).flatten() / 2)

    on_two(work, name)


def test_ranks_launch_in_one_order() -> None:
    """Ranks reduce buckets in the same order, though on rank 1 gradients arrive in reverse order and one is missing."""

    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank = parts.collectives.mesh.rank
        members = parts.members[1:] if rank else parts.members[::-1]
        for member in members:
            brings(reducer, member, rank)
        reducer.end_pass()
        for member in parts.members[1:]:
            assert torch.equal(summed_over_ranks(parts, reduced(parts, reducer, member)), mean(member))
        first = parts.members[0]
        got = summed_over_ranks(parts, reduced(parts, reducer, first))
        assert torch.equal(got, gradient(first, 0).flatten() / 2)

    on_two(work, "zero2")


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2"])
def test_what_comes_late_is_reduced_at_the_step(name: str) -> None:
    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank, late = parts.collectives.mesh.rank, parts.members[-1]
        for member in reversed(parts.members):
            brings(reducer, member, rank)
        reducer.end_pass()
        with reducer.no_sync():
            late.param.grad = gradient(late, rank)
            reducer.arrived(late)
        leftovers = reducer.leftovers()
        assert leftovers == [True] + [False] * (len(leftovers) - 1)
        reducer.launch(leftovers)
        assert torch.equal(summed_over_ranks(parts, reduced(parts, reducer, late)), 2 * mean(late))
        other = parts.members[0]
        assert torch.equal(summed_over_ranks(parts, reduced(parts, reducer, other)), mean(other))

    on_two(work, name)


@pytest.mark.parametrize("tiers", [Tiers(), Tiers(gradients=Tier.HOST)], ids=["device", "host"])
@pytest.mark.parametrize("name", PRESETS)
def test_micro_batches_add_up(name: str, tiers: Tiers) -> None:
    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank = parts.collectives.mesh.rank
        for number in range(2):
            reducer.begin_micro_batch(is_last=number == 1)
            for member in reversed(parts.members):
                brings(reducer, member, rank)
            assert reducer.holds_batch == (number == 1)
            reducer.end_pass()
            reducer.end_micro_batch()
        assert reducer.num_passes == (1 if name in ("ddp", "zero1", "zero3-once") else 2)
        for member in parts.members:
            assert torch.equal(summed_over_ranks(parts, reduced(parts, reducer, member)), mean(member))
        reducer.zero()
        assert not reducer.holds_batch
        for member in parts.members:
            assert not reduced(parts, reducer, member).any()

    on_two(work, name, accumulate=2, tiers=tiers)


def test_gradients_that_rest_nowhere_are_used_as_they_are_launched() -> None:
    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank = parts.collectives.mesh.rank
        for member in reversed(parts.members):
            before = len(user.used)
            brings(reducer, member, rank)
            is_first = member.fqn.endswith("weight")  # the last gradient of a unit
            assert len(user.used) == before + is_first
        assert user.used == [unit.members[0].fqn for unit in reversed(parts.units)]
        reducer.drain()

    on_two(work, "zero2", tiers=Tiers(gradients=None))


def test_on_one_rank_gradients_stay_where_they_are() -> None:
    def work(collectives: Collectives) -> None:
        parts = made(collectives, "zero2", 2, 2)
        reducer, _ = parts.reducer(accumulate=2)
        for member in parts.members:
            brings(reducer, member, 0)
            assert member.param.grad is not None
        held = sum(4 * member.span.num_elements for member in parts.members)
        ledger = parts.memory.ledger
        assert ledger.report(torch.device("cpu")).held["gradients", "device"] == held
        reducer.complete_unreduced()
        for member in parts.members:
            assert member.param.grad is not None
            assert torch.equal(member.param.grad, gradient(member, 0) / 2)
            assert torch.equal(reduced(parts, reducer, member), gradient(member, 0).flatten() / 2)
        reducer.zero()
        assert ledger.report(torch.device("cpu")).held.get(("gradients", "device"), 0) == 0
        brings(reducer, parts.members[0], 0)
        assert parts.members[0].param.grad is not None
        parts.members[0].param.grad.mul_(2)
        with pytest.raises(PartitaError, match=r"the \.grad of '0\.weight' was changed between backward and step"):
            reducer.complete_unreduced()

    on_threads(MeshShape(), work)


def test_numbers_that_are_not_finite_are_remembered() -> None:
    def work(parts: Made, reducer: GradientReducer, user: User) -> None:
        rank, member = parts.collectives.mesh.rank, parts.members[-1]
        for traces in (False, True):
            if traces:
                reducer.finite.traces = True
            for other in reversed(parts.members):
                other.param.grad = gradient(other, rank)
                if other is member and rank == 1:
                    other.param.grad.view(-1)[3] = float("inf")
                reducer.arrived(other)
            reducer.end_pass()
            reducer.drain()
            assert reducer.finite.is_suspect == (traces and rank == 1), "only the rank that it came from knows"
            reducer.zero()
            assert not reducer.finite.is_suspect

    on_two(work, "zero2")


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def work(collectives: Collectives) -> None:
        parts = made(collectives, "zero2", 1, 1)
        reducer, _ = parts.reducer()
        weight = parts.members[0]
        weight.param.grad = torch.zeros(weight.shape).to_sparse()
        with pytest.raises(PartitaError, match=r"the gradient of '0\.weight' is sparse"):
            reducer.arrived(weight)

    on_threads(MeshShape(), work)
