"""Updaters without autograd and config, on ranks as threads: immediate or overlapped, with states on any tier."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from partita.comm.collectives import Collectives
from partita.config.schema import Precision
from partita.errors import PartitaError
from partita.optim.consensus import LossScale
from partita.optim.step import StepUpdater
from partita.sharding.parameter import Member
from partita.sharding.placeholder import ShardedParameter
from partita.sharding.structure import Written
from partita.sharding.unit import UnitState
from partita.table.mesh_shape import MeshShape
from partita.table.residence import Tier
from partita.table.state_plan import PRESETS, Tiers
from tests.kit.threads import on_threads
from tests.sharding.made import Made, blocks, made

DATA = ("data",)
NUM_UNITS = 3
PLACES = {
    "device": Tiers(),
    "host": Tiers(gradients=Tier.HOST, optimizer=Tier.HOST),
    "everything on host": Tiers(Tier.HOST, Tier.HOST, Tier.HOST),
}


def optimizer_of(params: list[Any]) -> SGD:
    return SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1)


def gradient(shape: torch.Size, rank: int, step: int) -> Tensor:
    """Return a gradient of integers, so that the mean of two is exact."""
    return torch.arange(float(shape.numel())).view(shape) + 10 * rank + 4 * step


def on_two(
    name: str,
    tiers: Tiers,
    work: Callable[[Made, StepUpdater], None],
    clip_norm: float | None = None,
    *,
    spans_nodes: bool = False,
) -> None:
    """Run ``work`` with an updater on two ranks."""

    def run(collectives: Collectives) -> None:
        parts = made(collectives, name, NUM_UNITS, NUM_UNITS, tiers)
        reducer, _ = parts.reducer()
        written = Written(parts.units, 0)
        runtime: Any = SimpleNamespace(
            model=nn.Module(),
            row=parts.units[0].planned.row,
            units=parts.units,
            members=lambda: ((unit, member) for unit in parts.units for member in unit.members),
            publisher=parts.publisher,
            device=collectives.mesh.device,
            unsharder=parts.unsharder,
            memory=parts.memory,
            reducer=reducer,
            written=written,
            store_written=written.store_all,
            buffers=SimpleNamespace(has_changed=lambda: False),
            arguments=SimpleNamespace(checksum=0, describe=lambda: ""),
            collectives=collectives,
            gradient_group=collectives.group(DATA),
            spans_nodes=spans_nodes,
            wait_for_updates=lambda units: None,
            warm_up=lambda is_warming_up: None,
        )
        with torch._C.DisableTorchFunctionSubclass():
            optimizer = optimizer_of([member.param for member in parts.members])
        updater = StepUpdater(runtime, optimizer, LossScale(Precision(), needed=False), clip_norm)
        try:
            work(parts, updater)
            updater.wait_for_updates()
        finally:
            updater.close()

    on_threads(MeshShape(data=2), run, DATA)


def backward(parts: Made, updater: StepUpdater, step: int, bad: str = "") -> None:
    """Simulate a backward: set the gradient of every member, and end the reduce pass. ``bad`` gets a NaN on rank 1."""
    rank = parts.collectives.mesh.rank
    updater.begin()
    for member in reversed(parts.members):
        member.param.grad = gradient(member.shape, rank, step)
        if member.fqn == bad and rank == 1:
            member.param.grad.view(-1)[-1] = float("nan")
        updater._reducer.arrived(member)
    updater._reducer.end_pass()


def expected(num_steps: int, max_norms: Sequence[float] = ()) -> dict[str, Tensor]:
    """Return the weights after updates with the mean gradients by torch's optimizer."""
    model = blocks(NUM_UNITS)
    optimizer = optimizer_of(list(model.parameters()))
    for step in range(num_steps):
        for param in model.parameters():
            param.grad = (gradient(param.shape, 0, step) + gradient(param.shape, 1, step)) / 2
        if max_norms:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norms[step])
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def whole(parts: Made, member: Member) -> Tensor:
    """Return the full values of a parameter as the next forward reads them."""
    unit = next(unit for unit in parts.units if any(own is member for own in unit.members))
    if unit.always_unsharded:
        unit.finish_update()
        return member.param.detach()
    parts.unsharder.hold([unit])
    values = member.param.detach().clone()
    parts.unsharder.release_hold([unit])
    return values


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", PRESETS)
def test_parameters_as_on_one_process(name: str, where: str) -> None:
    values = expected(3)

    def work(parts: Made, updater: StepUpdater) -> None:
        for step in range(3):
            backward(parts, updater, step)
            result = updater.update()
            assert (result.stepped, result.lr) == (True, (0.01,))
        for member in parts.members:
            assert torch.equal(whole(parts, member), values[member.fqn]), member.fqn
        updater.wait_for_updates()
        for view in updater.views:
            assert torch.equal(view.tensor, view.slice_of(view.member.flat(values[view.member.fqn])))

    on_two(name, PLACES[where], work)


def test_settings_are_those_of_the_step() -> None:
    """An overlapped update uses the settings of its step, even if a schedule changes them before it has run."""

    def work(parts: Made, updater: StepUpdater) -> None:
        backward(parts, updater, 0)
        updater.update()
        updater.optimizer.param_groups[0]["lr"] = 1e9
        for member in parts.members:
            assert torch.equal(whole(parts, member), values[member.fqn])

    values = expected(1)
    on_two("zero1", PLACES["host"], work)


def test_who_uses_parameters_waits_for_their_update() -> None:
    def work(parts: Made, updater: StepUpdater) -> None:
        backward(parts, updater, 0)
        updater.update()
        assert all(type(member.param) is ShardedParameter for member in parts.members)
        updater.wait_for_updates()
        assert not any(type(member.param) is ShardedParameter for member in parts.members)

    on_two("zero2", PLACES["host"], work)


@pytest.mark.parametrize("name", PRESETS)
def test_gathers_between_nodes_are_under_way_when_the_step_returns(name: str) -> None:
    values = expected(2)

    def work(parts: Made, updater: StepUpdater) -> None:
        are_gathered = [unit for unit in parts.units if unit.segments[0].planned.update_is_gathered]
        for step in range(2):
            backward(parts, updater, step)
            updater.update()
            under_way = [unit for unit in parts.units if unit.state is UnitState.UNSHARDING]
            assert under_way == [unit for unit in are_gathered if unit.always_unsharded]
        for member in parts.members:
            assert torch.equal(whole(parts, member), values[member.fqn]), member.fqn

    on_two(name, PLACES["device"], work, spans_nodes=True)


@pytest.mark.parametrize("where", PLACES)
def test_clipping(where: str) -> None:
    """Gradients are clipped to the configured norm, or to a norm set for one update."""
    values = expected(2, [5.0, 1000.0])

    def work(parts: Made, updater: StepUpdater) -> None:
        backward(parts, updater, 0)
        before = updater.update().grad_norm
        backward(parts, updater, 1)
        norm = updater.clip(1000.0)
        with pytest.raises(PartitaError, match=r"a backward between engine\.clip_grad_norm\(\) and engine\.step\(\)"):
            updater.begin()
        assert updater.update().grad_norm == norm
        assert before is not None
        assert norm > before > 100.0
        for member in parts.members:
            torch.testing.assert_close(whole(parts, member), values[member.fqn])

    on_two("zero3", PLACES[where], work, clip_norm=5.0)


@pytest.mark.parametrize("where", PLACES)
def test_a_gradient_that_is_not_finite_leaves_the_update_out(where: str) -> None:
    values = expected(0)

    def work(parts: Made, updater: StepUpdater) -> None:
        backward(parts, updater, 0, bad="1.weight")
        result = updater.update()
        assert (result.stepped, result.skipped, updater.steps) == (False, True, 1)
        for member in parts.members:
            assert torch.equal(whole(parts, member), values[member.fqn])

    with pytest.warns(
        UserWarning, match=r"step 1: the gradient of '1\.weight' is not finite .*; the update is skipped"
    ):
        on_two("zero2", PLACES[where], work)
