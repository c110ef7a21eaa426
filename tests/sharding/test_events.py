"""Events of units that are always unsharded, so without an unsharder: their order, and no unnecessary hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from partita.sharding.assemble import make_units
from partita.sharding.hooks import UnitEvents
from partita.sharding.unit import Unit
from partita.sharding.unit_events import Subscriber, UnitCall
from partita.table.mesh_shape import MeshShape
from partita.table.state_plan import Tiers
from tests.sharding.made import WIDTH, blocks, planned_units


class Seen:
    """The events that subscribers received, in order."""

    def __init__(self) -> None:
        self.events = list[str]()

    def note(self, event: str, name: str = "") -> Callable[..., None]:
        def told(visit: UnitCall, *graph: bool) -> None:
            self.events.append(" ".join([f"{name}{event}", visit.unit.name, *(["graph"] if any(graph) else [])]))

        return told

    def subscriber(self, name: str = "") -> Subscriber:
        return Subscriber(
            opened=self.note("open", name),
            closed=self.note("close", name),
            opened_backward=self.note("back", name),
            closed_backward=self.note("done", name),
            backward_ended=lambda: self.events.append(f"{name}end"),
        )


def model_and_units(num: int) -> tuple[nn.Sequential, list[Unit]]:
    model = blocks(num)
    nothing_is_gathered: Any = None
    planned = planned_units(model, "ddp", MeshShape(), Tiers())
    return model, make_units(model, planned, 0, nothing_is_gathered, by_kernels=False)


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def loss_of(model: nn.Module, *, requires_grad: bool = False) -> Tensor:
    loss: Tensor = model(torch.ones(2, WIDTH, requires_grad=requires_grad)).sum()
    return loss


def test_a_unit_without_subscribers_has_no_hooks() -> None:
    model, units = model_and_units(3)
    events = UnitEvents()
    events.subscribe(units[1:2], Seen().subscriber())
    assert [num_hooks(layer) for layer in model] == [0, 2, 0]
    events.remove()
    assert num_hooks(model) == 0


def test_forward_and_backward() -> None:
    model, units = model_and_units(2)
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, seen.subscriber())
    loss = loss_of(model)
    assert seen.events == ["open 0", "close 0 graph", "open 1", "close 1 graph"]
    seen.events.clear()
    loss.backward()
    # Unit 1's input is unit 0's output, so one gradient closes unit 1 and opens unit 0, in either order.
    assert sorted(seen.events[1:3]) == ["back 0", "done 1"]
    assert (seen.events[0], seen.events[3:]) == ("back 1", ["done 0", "end"])
    seen.events.clear()
    with torch.no_grad():
        loss_of(model)
    assert seen.events == ["open 0", "close 0", "open 1", "close 1"]


def test_subscribers_are_told_in_order_and_closed_in_reverse() -> None:
    model, units = model_and_units(1)
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, seen.subscriber("a:"))
    events.subscribe(units, seen.subscriber("b:"))
    assert num_hooks(model) == 2, "one set of hooks"
    loss_of(model).backward()
    opened, closed = ["a:open 0", "b:open 0"], ["b:close 0 graph", "a:close 0 graph"]
    assert seen.events[:4] == opened + closed
    assert seen.events[4:] == ["a:back 0", "b:back 0", "b:done 0", "a:done 0", "a:end", "b:end"]


def test_who_only_opens_has_hooks_before_forwards_alone() -> None:
    model, units = model_and_units(2)
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, Subscriber(opened=seen.note("open")))
    assert not any(layer._forward_hooks for layer in model)
    loss_of(model).backward()
    assert seen.events == ["open 0", "open 1"]
    events.subscribe(units[:1], seen.subscriber("late:"))
    assert [len(layer._forward_hooks) for layer in model] == [1, 0]
    seen.events.clear()
    loss_of(model)
    assert seen.events == ["open 0", "late:open 0", "late:close 0 graph", "open 1"]


def test_a_forward_that_fails_is_closed() -> None:
    model, units = model_and_units(2)
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, seen.subscriber())

    def fail(*args: object) -> None:
        raise RuntimeError("inside")

    hook = model[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside"):
        loss_of(model)
    hook.remove()
    assert seen.events == ["open 0", "close 0 graph", "open 1", "close 1"]
    seen.events.clear()
    loss_of(model).backward()
    assert seen.events.count("end") == 1


def test_a_subscriber_that_refuses_ends_the_backward_and_is_asked_again() -> None:
    """After a subscriber's error has ended a backward, the next backward calls the subscriber again."""
    model, units = model_and_units(1)
    events, asked = UnitEvents(), list[str]()

    def refuse(visit: UnitCall) -> None:
        asked.append(visit.unit.name)
        raise RuntimeError("refused")

    events.subscribe(units, Subscriber(opened_backward=refuse))
    loss = loss_of(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            loss.backward(retain_graph=True)
    events.backwards.forget()
    assert asked == ["0", "0"]


def test_visits_under_way_at_a_time() -> None:
    """Two forwards of one unit before their backwards are separate calls."""
    model, units = model_and_units(1)
    events, visits = UnitEvents(), list[UnitCall]()
    events.subscribe(units, Subscriber(opened=visits.append, closed_backward=lambda visit: visits.remove(visit)))
    losses = [loss_of(model, requires_grad=True) for _ in range(2)]
    first, second = visits
    assert first is not second
    losses[1].backward()
    assert visits == [first]
    losses[0].backward()
    assert visits == []


def test_a_view_that_is_changed_in_place_opens_and_closes_its_units() -> None:
    """Units whose outputs are views that are changed in place get all their events in backward."""
    model, units = model_and_units(2)
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, seen.subscriber())
    inner = model[0](torch.ones(2, 3, WIDTH))
    assert inner._base is not None
    inner.mul_(2)
    output = model[1](inner)
    output += inner
    seen.events.clear()
    output.sum().backward()
    assert seen.events[0] == "back 1"
    assert seen.events.index("done 1") <= 2
    assert sorted(seen.events) == sorted(["back 1", "done 1", "back 0", "done 0", "end"])


class WritesItsInput(nn.Linear):
    """Changes its input in place and returns it. Of a view, only the base's node then remains in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(self.weight.sum())
        return x


def test_an_input_that_is_changed_in_place_is_an_output() -> None:
    model, units = model_and_units(2)
    model[1].forward = WritesItsInput.forward.__get__(model[1])
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, seen.subscriber())
    for shape in ((2, WIDTH), (2, 3, WIDTH)):
        output = model(torch.ones(shape))
        seen.events.clear()
        output.sum().backward()
        assert seen.events[0] == "back 1", shape
        assert sorted(seen.events) == sorted(["back 1", "done 1", "back 0", "done 0", "end"]), shape


def test_an_input_that_is_given_back_is_no_output() -> None:
    model, units = model_and_units(2)
    model[1].forward = lambda x: x
    events, seen = UnitEvents(), Seen()
    events.subscribe(units, seen.subscriber())
    loss_of(model).backward()
    assert seen.events == ["open 0", "close 0 graph", "open 1", "close 1", "back 0", "done 0", "end"]
