"""Units and the unsharder without hooks, on ranks in threads: states, slots, and reads of sharded parameters."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.errors import PartitaError
from partita.memory.streams import Event
from partita.sharding.placeholder import is_sharded
from partita.sharding.unit import Unit, UnitState
from partita.sharding.unit_events import Backwards, FollowedUnit, UnitCall
from partita.table.mesh_shape import MeshShape
from partita.table.residence import Tier
from partita.table.state_plan import Tiers
from tests.kit.threads import on_threads
from tests.sharding.made import Made, blocks, made

TWO, NODES = MeshShape(data=2), MeshShape(data=4, node=2)
SHARDED, UNSHARDING, WHOLE = UnitState.SHARDED, UnitState.UNSHARDING, UnitState.UNSHARDED
EXPECTED = [param.detach() for param in blocks(4).parameters()]


def on(mesh: MeshShape, work: Callable[[Made], object], name: str, num_units: int, depth: int, **options: int) -> None:
    """Run ``work`` on every rank with units of the preset ``name``."""
    groups = [("data",), ("local",)]
    on_threads(mesh, lambda collectives: work(made(collectives, name, num_units, depth, **options)), *groups)


def values(unit: Unit) -> list[Tensor]:
    return [member.param.detach().clone() for member in unit.members]


def assert_whole(*units: Unit) -> None:
    for unit in units:
        assert unit.state is WHOLE
        expected = EXPECTED[2 * unit.number :]
        assert all(torch.equal(got, want) for got, want in zip(values(unit), expected, strict=False))


def visit(unit: Unit, made: Made) -> UnitCall:
    """Return a call of the unit, as its hooks would create it."""
    made.followed.append(FollowedUnit(unit, Backwards(), [made.unsharder.subscriber]))
    return UnitCall(made.followed[-1])


# ---------------------------------------------------------------------------------------------------------- units


@pytest.mark.parametrize("name", ["zero3", "zero3-kept", "hierarchical"])
def test_gather_and_release(name: str) -> None:
    def work(made: Made) -> None:
        unit, other = made.units
        assert unit.state is SHARDED
        assert all(is_sharded(member.param) for member in unit.members)
        assert unit.storage.nbytes() == 0
        for _ in range(2):
            unit.start_unshard()
            assert unit.state is UNSHARDING
            assert not other.can_unshard, "there is one slot"
            unit.finish_unshard()
            assert_whole(unit)
            unit.keep_secondary()
            assert unit.has_secondary == (name == "hierarchical")
            unit.reshard()
            assert (unit.state, unit.slot, unit.storage.nbytes()) == (SHARDED, None, 0)

    on(NODES, work, name, 2, 1)


def test_what_rests_on_the_host_is_copied_into_a_slot() -> None:
    def work(collectives: Collectives) -> None:
        parts = made(collectives, "ddp", 1, 1, Tiers(parameters=Tier.HOST))
        (unit,) = parts.units
        assert unit.state is SHARDED
        unit.start_unshard()
        unit.finish_unshard()
        assert_whole(unit)

    on_threads(TWO, work, ("data",))


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_updated_weights_come_to_rest(name: str) -> None:
    def work(made: Made) -> None:
        for segment in (segment for unit in made.units for segment in unit.segments):
            assert segment.master is not None
            segment.master.lease().wait().add_(1.0)
        made.publisher.publish(made.units)
        for unit in made.units:
            if unit.state is SHARDED:
                unit.start_unshard()
                unit.finish_unshard()
            for got, want in zip(values(unit), EXPECTED[2 * unit.number :], strict=False):
                assert torch.equal(got, want + 1.0)

    on(TWO, work, name, 2, 2)


def test_whoever_uses_a_unit_waits_for_its_update() -> None:
    def work(made: Made) -> None:
        (unit,), passed = made.units, list[str]()
        unit.await_update(Event(lambda: passed.append("updated")))
        assert all(is_sharded(member.param) for member in unit.members)
        assert passed == []
        unit.finish_update()
        unit.finish_update()
        assert passed == ["updated"], "once"
        assert_whole(unit)

    on(TWO, work, "zero1", 1, 1)


# --------------------------------------------------------------------------------------------------------- unsharder


def test_open_visits_are_counted() -> None:
    def work(made: Made) -> None:
        unsharder, (unit, _) = made.unsharder, made.units
        first, second = visit(unit, made), visit(unit, made)
        unsharder.subscriber.opened(first)
        unsharder.subscriber.opened(second)
        unsharder.subscriber.closed(first, False)
        assert_whole(unit)
        unsharder.subscriber.closed(second, False)
        assert unit.state is SHARDED
        assert made.agreement.gathered == [unit.number], "gathered once"

    on(TWO, work, "zero3", 2, 2)


@pytest.mark.parametrize(("name", "between"), [("zero3", SHARDED), ("zero3-kept", WHOLE), ("hierarchical", SHARDED)])
def test_between_forward_and_backward(name: str, between: UnitState) -> None:
    def work(made: Made) -> None:
        tell, (unit,) = made.unsharder.subscriber, made.units
        forward = visit(unit, made)
        tell.opened(forward)
        tell.closed(forward, True)
        assert unit.state is between
        with torch.no_grad():  # as in a backward without create_graph
            tell.opened_backward(forward)
        assert_whole(unit)
        tell.closed_backward(forward)
        tell.backward_ended()
        assert unit.state is SHARDED

    on(NODES, work, name, 1, 1)


def test_the_last_steps_order_is_gathered_ahead() -> None:
    def work(made: Made) -> None:
        unsharder, units = made.unsharder, made.units
        for unit in units:
            unsharder.open(unit)
            unsharder.close(unit)
        assert unsharder.forward_order == []
        unsharder.end_micro_batch()
        assert unsharder.forward_order == units
        assert made.agreement.num_steps == 1
        made.agreement.gathered.clear()
        unsharder.open(units[0])
        assert [unit.state for unit in units] == [WHOLE, UNSHARDING, SHARDED]
        unsharder.close(units[0])
        assert [unit.state for unit in units] == [SHARDED, UNSHARDING, SHARDED]
        unsharder.open(units[1])
        assert [unit.state for unit in units] == [SHARDED, WHOLE, UNSHARDING]
        assert made.agreement.gathered == [0, 1, 2]
        unsharder.close(units[1])
        unsharder.end_micro_batch()
        assert {unit.state for unit in units} == {SHARDED}

    unit_bytes = 4 * 2 * 256
    on(TWO, work, "zero3", 3, 2, prefetch_bytes=unit_bytes)


def test_an_idle_unit_makes_room() -> None:
    def work(made: Made) -> None:
        unsharder, (first, second, third) = made.unsharder, made.units
        unsharder.open(first)
        unsharder.close(first, between=True)
        unsharder.open(second)
        assert (first.state, second.state) == (WHOLE, WHOLE), "kept, as there is room"
        unsharder.open(third)
        assert (first.state, second.state) == (SHARDED, WHOLE), "the idle one went, the open one stayed"
        assert_whole(second, third)

    on(TWO, work, "zero3-kept", 3, 2)


def test_holding_units_takes_memory_beyond_the_pools() -> None:
    def work(made: Made) -> None:
        unsharder = made.unsharder
        before = sum(made.memory.ledger.report(torch.device("cpu")).held.values())
        unsharder.hold(made.units)  # without the warning of a pool that grows
        assert_whole(*made.units)
        unsharder.release_hold(made.units)
        assert {unit.state for unit in made.units} == {SHARDED}
        assert sum(made.memory.ledger.report(torch.device("cpu")).held.values()) == before

    on(TWO, work, "zero3", 3, 1)


def test_reading_a_parameter_at_rest() -> None:
    def work(made: Made) -> None:
        unsharder, (unit, _) = made.unsharder, made.units
        weight = unit.members[0].param
        unsharder.forwards_under_way(1)
        with pytest.warns(UserWarning, match=r"'0\.weight' is read outside the forward of its unit '0'"):
            assert weight.sum() == EXPECTED[0].sum()
        assert (unit.state, unit.in_use) == (WHOLE, True)
        unsharder.end_micro_batch()
        assert unit.state is SHARDED, "at the step"

    def either(made: Made) -> None:
        work(made) if made.collectives.mesh.rank == 0 else read_along(made)

    on(TWO, either, "zero3", 2, 2)


def read_along(made: Made) -> None:
    """Gather the unit of a parameter that another rank reads."""
    made.units[0].start_unshard()
    made.units[0].finish_unshard()


def test_a_graph_of_other_parameters_is_refused() -> None:
    def work(made: Made) -> None:
        tell, (unit,) = made.unsharder.subscriber, made.units
        forward = visit(unit, made)
        tell.opened(forward)
        tell.closed(forward, True)
        made.unsharder.updated()
        with pytest.raises(PartitaError, match=r"backward reached unit '0' with parameters that were changed"):
            tell.opened_backward(forward)
        assert unit.state is SHARDED

    on(TWO, work, "zero3", 1, 1)


def test_what_failed_is_closed_by_the_next_forward() -> None:
    def work(made: Made) -> None:
        unsharder, (unit,) = made.unsharder, made.units
        unsharder.open(unit)
        unsharder.open(unit)
        unsharder.begin_forward()
        assert (unit.state, unit.open_calls) == (SHARDED, 0)

    on(TWO, work, "zero3", 1, 1)
