"""Skipped recomputation: as many of the last modules as fit the limit keep their activations, with the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.activation import recompute_budget
from tests.activation.test_activation_partition import course, gpt2
from tests.activation.test_recompute import NoisyStack
from tests.kit.live_bytes import LiveBytes
from tests.kit.models import WIDTH, Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, train_recipe

NUM_BLOCKS, ROWS = 4, 100
ROW = 4 * ROWS * WIDTH
# What a block keeps: the norm's output and two statistics per row, the output of the wider layer, and that of GELU.
BLOCK = ROW + 2 * 4 * ROWS + 2 * ROW + 2 * ROW


def keeping(num_bytes: int | str, **more: Any) -> dict[str, Any]:
    return {"activations": {"checkpoint": "units", "keep_bytes": num_bytes, **more}}


class Counted(Stack):
    """Stack that records the runs of its blocks."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(num_blocks)
        self.calls = list[int]()
        for number, block in enumerate(self.blocks):
            block.norm.register_forward_pre_hook(lambda *_, number=number: self.calls.append(number))

    def repeated(self, engine: partita.Engine, rows: int = ROWS) -> list[int]:
        """Run a step; return the blocks that it recomputes."""
        self.calls.clear()
        loss = engine(torch.randn(rows, WIDTH)).square().mean()
        assert self.calls == list(range(len(self.blocks)))
        self.calls.clear()
        engine.backward(loss)
        engine.step()
        return sorted(self.calls)


def test_the_last_blocks_that_fit_are_kept() -> None:
    model = Counted()
    with partita.initialize(model, keeping(2 * BLOCK)) as engine:
        assert model.repeated(engine) == [0, 1, 2, 3]  # measured
        assert model.repeated(engine) == [0, 1]
        assert engine.memory_report().held["kept_whole", "device"] == 2 * BLOCK
        assert model.repeated(engine, ROWS // 2) == [0, 1]
        assert model.repeated(engine, 2 * ROWS) == [0, 1, 2, 3]  # larger than all before: measured again
        assert model.repeated(engine) == [0, 1, 2]
        assert engine.memory_report().held["kept_whole", "device"] == 2 * BLOCK


def test_kept_bytes_are_what_is_counted() -> None:
    model = Counted()
    with partita.initialize(model, keeping(3 * BLOCK + BLOCK // 2)) as engine:
        x, found = torch.randn(ROWS, WIDTH), []
        for _ in range(2):
            with LiveBytes() as live:
                loss = engine(x).square().mean()
                found.append(live.total)
            engine.backward(loss)
            engine.step()
        assert found[1] - found[0] == engine.memory_report().held["kept_whole", "device"] == 3 * BLOCK


def test_forwards_before_a_backward_share_the_limit() -> None:
    """Forwards before a backward share the limit; the first time there are two, the second one keeps nothing."""
    model = Counted()
    with partita.initialize(model, keeping(2 * BLOCK)) as engine:
        x, kept, repeated = torch.randn(ROWS, WIDTH), [], []
        for num in (1, 1, 2, 2, 1, 3):
            with LiveBytes() as live:
                losses = [engine(x).square().mean() for _ in range(num)]
                kept.append(live.total - (num * kept[0] if kept else 0))
            model.calls.clear()
            engine.backward(torch.stack(losses).sum())
            engine.step()
            repeated.append(len(model.calls))
            losses.clear()
        assert kept[1:] == [2 * BLOCK, 2 * BLOCK, 2 * BLOCK, BLOCK, 2 * BLOCK]
        assert repeated == [4, 2, 2 + 4, 3 + 3, 3, 3 + 3 + 4]
        assert model.repeated(engine) == [0, 1, 2, 3]


def test_a_forward_whose_backward_never_comes_is_forgotten_at_the_step() -> None:
    model = Counted()
    with partita.initialize(model, keeping(2 * BLOCK)) as engine:
        model.repeated(engine)
        engine(torch.randn(ROWS, WIDTH))  # awaits a backward, so the next forward keeps nothing
        assert model.repeated(engine) == [0, 1, 2, 3]
        assert model.repeated(engine) == [0, 1, 2]
        assert model.repeated(engine) == [0, 1, 2]


def test_without_room_nothing_is_kept() -> None:
    model = Counted()
    with partita.initialize(model, keeping(BLOCK - 1)) as engine:
        for _ in range(2):
            assert model.repeated(engine) == [0, 1, 2, 3]


def test_auto_is_what_the_first_step_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Counted()
    spare = int(1.5 * BLOCK / recompute_budget.SPARE_SHARE)
    monkeypatch.setattr(recompute_budget, "spare_bytes", lambda device: spare)
    with partita.initialize(model, keeping("auto")) as engine:
        assert model.repeated(engine) == [0, 1, 2, 3]
        assert model.repeated(engine) == [0, 1, 2]
    monkeypatch.undo()
    with partita.initialize(model, keeping("auto")) as engine:  # this machine has more free memory than the model needs
        model.repeated(engine)
        assert model.repeated(engine) == []


class Nested(Stack):
    """Stack of blocks that contain blocks; both are recomputed."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([Stack(1) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            for inner in self.inner:
                x = inner(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Nested.Outer() for _ in range(3)])


def run_recipes() -> None:
    """Check that ``keep_bytes`` changes no bits, with dropout, statistics, nested modules, and inputs on disk."""
    settings = ({"checkpoint": "units"}, {"checkpoint": "selective"}, {"checkpoint": "units", "offload": "disk"})
    for each in settings:
        expected = train_recipe(Recipe(NoisyStack, square_loss, config={"activations": each}), {"stage": 3})
        kept = {**each, "keep_bytes": 4000}
        assert_same_bits(
            train_recipe(Recipe(NoisyStack, square_loss, config={"activations": kept}), {"stage": 3}),
            expected,
            str(each),
        )
    nested = [{"checkpoint": ["Outer", "Block"]}, {"checkpoint": ["Outer", "Block"], "keep_bytes": 10000}]
    assert_same_bits(
        *(train_recipe(Recipe(Nested, config={"activations": each}), {"stage": 1}) for each in nested), "nested"
    )


def test_bits_are_those_of_recomputed_modules() -> None:
    on_ranks(2, run_recipes)


def on_mesh(parallel: dict[str, int], activations: list[dict[str, Any]]) -> list[list[Any]]:
    return [course(gpt2, {"parallel": parallel, "activations": each}) for each in activations]


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"tensor": 3}, {"sequence": 2}])
def test_ranks_that_compute_together_keep_alike(parallel: dict[str, int]) -> None:
    """Ranks that compute together recompute the same calls; otherwise some would wait forever for the others."""
    units = {"checkpoint": "units"}
    ways = [units, {**units, "keep_bytes": 20000}, {**units, "keep_bytes": "auto"}]
    if "tensor" in parallel:
        ways.append({**units, "keep_bytes": 20000, "partition": True})
    (world,) = parallel.values()
    for found in on_ranks(world, on_mesh, parallel, ways, timeout=240):
        assert all(each == found[0] for each in found)
