"""Executor and residency without hooks, on ranks in threads: what is whole when, in whose slot, and who is asked."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.plan.mesh_shape import MeshShape
from partita.plan.residence import Tier
from partita.plan.state_plan import Tiers
from partita.sharding.placeholder import is_resting
from partita.sharding.unit import Unit, UnitState
from partita.sharding.visits import Backwards, FollowedUnit, Visit
from tests.fakes import on_ranks
from tests.sharding.made import Made, blocks, made

TWO, NODES = MeshShape(data=2), MeshShape(data=4, node=2)
RESTING, GATHERING, WHOLE = UnitState.RESTING, UnitState.GATHERING, UnitState.WHOLE
EXPECTED = [param.detach() for param in blocks(4).parameters()]


def on(mesh: MeshShape, work: Callable[[Made], object], name: str, num_units: int, depth: int, **options: int) -> None:
    """Run ``work`` on every rank with the units of that preset."""
    groups = [("data",), ("local",)]
    on_ranks(mesh, lambda collectives: work(made(collectives, name, num_units, depth, **options)), *groups)


def values(unit: Unit) -> list[Tensor]:
    return [member.param.detach().clone() for member in unit.members]


def assert_whole(*units: Unit) -> None:
    for unit in units:
        assert unit.state is WHOLE
        expected = EXPECTED[2 * unit.number :]
        assert all(torch.equal(got, want) for got, want in zip(values(unit), expected, strict=False))


def visit(unit: Unit, made: Made) -> Visit:
    """A visit that the unit's hooks would make."""
    made.followed.append(FollowedUnit(unit, Backwards(), [made.residency.subscriber]))
    return Visit(made.followed[-1])


# ---------------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize("name", ["zero3", "zero3-kept", "hierarchical"])
def test_gather_and_release(name: str) -> None:
    def work(made: Made) -> None:
        unit, other = made.units
        assert unit.state is RESTING
        assert all(is_resting(member.param) for member in unit.members)
        assert unit.storage.nbytes() == 0
        for _ in range(2):
            unit.start_gather()
            assert unit.state is GATHERING
            assert not other.can_gather, "there is one slot"
            unit.finish_gather()
            assert_whole(unit)
            unit.keep_second()
            assert unit.has_second == (name == "hierarchical")
            unit.release()
            assert (unit.state, unit.slot, unit.storage.nbytes()) == (RESTING, None, 0)

    on(NODES, work, name, 2, 1)


def test_what_rests_on_the_host_is_copied_into_a_slot() -> None:
    def work(collectives: Collectives) -> None:
        parts = made(collectives, "ddp", 1, 1, Tiers(parameters=Tier.HOST))
        (unit,) = parts.units
        assert unit.state is RESTING
        unit.start_gather()
        unit.finish_gather()
        assert_whole(unit)

    on_ranks(TWO, work, ("data",))


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_updated_weights_come_to_rest(name: str) -> None:
    def work(made: Made) -> None:
        for segment in (segment for unit in made.units for segment in unit.segments):
            assert segment.master is not None
            segment.master.lend().wait().add_(1.0)
        made.publisher.publish(made.units)
        for unit in made.units:
            if unit.state is RESTING:
                unit.start_gather()
                unit.finish_gather()
            for got, want in zip(values(unit), EXPECTED[2 * unit.number :], strict=False):
                assert torch.equal(got, want + 1.0)

    on(TWO, work, name, 2, 2)


def test_whoever_uses_a_unit_waits_for_its_update() -> None:
    def work(made: Made) -> None:
        (unit,), passed = made.units, list[str]()
        unit.await_update(Event(lambda: passed.append("updated")))
        assert all(is_resting(member.param) for member in unit.members)
        assert passed == []
        unit.finish_update()
        unit.finish_update()
        assert passed == ["updated"], "once"
        assert_whole(unit)

    on(TWO, work, "zero1", 1, 1)


# --------------------------------------------------------------------------------------------------------- residency


def test_open_visits_are_counted() -> None:
    def work(made: Made) -> None:
        residency, (unit, _) = made.residency, made.units
        first, second = visit(unit, made), visit(unit, made)
        residency.subscriber.opened(first)
        residency.subscriber.opened(second)
        residency.subscriber.closed(first, False)
        assert_whole(unit)
        residency.subscriber.closed(second, False)
        assert unit.state is RESTING
        assert made.agreement.gathered == [unit.number], "gathered once"

    on(TWO, work, "zero3", 2, 2)


@pytest.mark.parametrize(("name", "between"), [("zero3", RESTING), ("zero3-kept", WHOLE), ("hierarchical", RESTING)])
def test_between_forward_and_backward(name: str, between: UnitState) -> None:
    def work(made: Made) -> None:
        tell, (unit,) = made.residency.subscriber, made.units
        forward = visit(unit, made)
        tell.opened(forward)
        tell.closed(forward, True)
        assert unit.state is between
        with torch.no_grad():  # as in a backward without create_graph
            tell.opened_backward(forward)
        assert_whole(unit)
        tell.closed_backward(forward)
        tell.backward_ended()
        assert unit.state is RESTING

    on(NODES, work, name, 1, 1)


def test_the_last_steps_order_is_gathered_ahead() -> None:
    def work(made: Made) -> None:
        residency, units = made.residency, made.units
        for unit in units:
            residency.open(unit)
            residency.close(unit)
        assert residency.forward_order == []
        residency.end_micro_batch()
        assert residency.forward_order == units
        assert made.agreement.num_steps == 1
        made.agreement.gathered.clear()
        residency.open(units[0])
        assert [unit.state for unit in units] == [WHOLE, GATHERING, RESTING]
        residency.close(units[0])
        assert [unit.state for unit in units] == [RESTING, GATHERING, RESTING]
        residency.open(units[1])
        assert [unit.state for unit in units] == [RESTING, WHOLE, GATHERING]
        assert made.agreement.gathered == [0, 1, 2]
        residency.close(units[1])
        residency.end_micro_batch()
        assert {unit.state for unit in units} == {RESTING}

    unit_bytes = 4 * 2 * 256
    on(TWO, work, "zero3", 3, 2, prefetch_bytes=unit_bytes)


def test_an_idle_unit_makes_room() -> None:
    def work(made: Made) -> None:
        residency, (first, second, third) = made.residency, made.units
        residency.open(first)
        residency.close(first, between=True)
        residency.open(second)
        assert (first.state, second.state) == (WHOLE, WHOLE), "kept, as there is room"
        residency.open(third)
        assert (first.state, second.state) == (RESTING, WHOLE), "the idle one went, the open one stayed"
        assert_whole(second, third)

    on(TWO, work, "zero3-kept", 3, 2)


def test_holding_units_takes_memory_beyond_the_pools() -> None:
    def work(made: Made) -> None:
        residency = made.residency
        before = sum(made.memory.ledger.report(torch.device("cpu")).held.values())
        residency.hold(made.units)  # without the warning of a pool that grows
        assert_whole(*made.units)
        residency.let_go(made.units)
        assert {unit.state for unit in made.units} == {RESTING}
        assert sum(made.memory.ledger.report(torch.device("cpu")).held.values()) == before

    on(TWO, work, "zero3", 3, 1)


def test_reading_a_parameter_at_rest() -> None:
    def work(made: Made) -> None:
        residency, (unit, _) = made.residency, made.units
        weight = unit.members[0].param
        with pytest.raises(PartitaError, match=r"parameter '0\.weight' is at rest: .*engine\.gathered"):
            weight.sum()
        residency.forwards_under_way(1)
        with pytest.warns(UserWarning, match=r"'0\.weight' is read outside the forward of its unit '0'"):
            assert weight.sum() == EXPECTED[0].sum()
        assert (unit.state, unit.in_use) == (WHOLE, True)
        residency.end_micro_batch()
        assert unit.state is RESTING, "at the step"

    def either(made: Made) -> None:
        work(made) if made.collectives.mesh.rank == 0 else read_along(made)

    on(TWO, either, "zero3", 2, 2)


def read_along(made: Made) -> None:
    """What the other ranks do where one reads a parameter: gather it, too."""
    made.units[0].start_gather()
    made.units[0].finish_gather()


def test_a_graph_of_other_parameters_is_refused() -> None:
    def work(made: Made) -> None:
        tell, (unit,) = made.residency.subscriber, made.units
        forward = visit(unit, made)
        tell.opened(forward)
        tell.closed(forward, True)
        made.residency.updated()
        with pytest.raises(PartitaError, match=r"backward reached unit '0' with parameters that were changed"):
            tell.opened_backward(forward)
        assert unit.state is RESTING

    on(TWO, work, "zero3", 1, 1)


def test_what_failed_is_closed_by_the_next_forward() -> None:
    def work(made: Made) -> None:
        residency, (unit,) = made.residency, made.units
        residency.open(unit)
        residency.open(unit)
        residency.begin_forward()
        assert (unit.state, unit.visits) == (RESTING, 0)

    on(TWO, work, "zero3", 1, 1)
