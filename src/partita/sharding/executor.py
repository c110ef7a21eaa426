"""Moves a unit's parameters between the residences of its row: gather, release, publish. Knows how, never when."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.memory.allocate import allocate
from partita.memory.buffer_pool import BufferPool, Loan, Slot
from partita.memory.streams import Event, record
from partita.memory.timeline import span, told
from partita.plan.residence import Residence, Tier
from partita.plan.steps import steps
from partita.plan.strategies import PublishPlan
from partita.sharding.interpreter import Interpreter, Running
from partita.sharding.publish import PublishCall, RunnablePublish, store
from partita.sharding.unit import Segment, Unit, UnitState


class Executor:
    """Gathers, releases and publishes units.

    Invariants: a unit that is not RESTING holds a slot of the pool (unless it rests whole); every slot's memory is
    written only after the event of its last use; a GATHERING unit's parameters are still of class ``Resting``.

    Args:
        scratch: memory of :func:`~partita.plan.slots.unshard_scratch_bytes`, if any is needed.
    """

    def __init__(self, collectives: Collectives, pool: BufferPool, loan: Loan, scratch: Tensor | None = None) -> None:
        self._interpreter = Interpreter(collectives)
        self._pool = pool
        self._loan = loan
        self._scratch = scratch
        self._mesh = collectives.mesh.shape
        self._stream = collectives.mesh.stream("parameters")
        self.device = collectives.mesh.device
        self._is_warming_up = False

    def can_gather(self, unit: Unit) -> bool:
        """Return whether the pool has a slot left for this unit."""
        return self._pool.available(unit.planned.num_bytes)

    def start_gather(self, unit: Unit, spare: bool = False, exact: bool = False) -> None:
        """RESTING to GATHERING: from the second shard where there is one, else from what rests.

        Args:
            exact: as it rests, also where what is computed with is decoded.
        """
        unit.is_exact = exact
        slot, updated, second = self._lend(unit, spare=spare), unit.updated, unit.has_second and not exact

        def gather() -> None:
            slot.last_use.wait()
            updated.wait()
            gathers, scratch = list[Running](), self._scratch
            for segment in unit.segments:
                plan, source, planned = segment.plan, segment.rest, segment.planned
                ops = steps(plan.param_rest, plan.param_compute, self._mesh) if exact else planned.unshards
                if second and segment.second is not None:
                    unit.second_kept.wait()
                    source, ops = segment.second, steps(plan.param_between, plan.param_compute, self._mesh)
                begun = self._interpreter.begin(ops, source, segment.full, tag=unit.number, scratch=scratch)
                gathers.append(begun)
                if scratch is not None:
                    scratch = scratch[planned.scratch_bytes :]
            for begun in gathers:
                begun.finish()

        unit.begin_gather(self._stream.run(told(gather, "gather", unit.title)))

    def lay(self, unit: Unit) -> None:
        """Give a new unit its storage: memory of its own where it rests whole, else a slot until it is released."""
        if unit.rests_whole:
            unit.lay(allocate(unit.planned.num_bytes, torch.uint8, self.device).untyped_storage())
        else:
            unit.storage = torch.UntypedStorage(0, device=self.device)
            self._lend(unit, newest=True).last_use.wait()
            unit.lay(unit.storage)

    def _lend(self, unit: Unit, *, spare: bool = False, newest: bool = False) -> Slot:
        unit.slot = self._pool.borrow(unit.planned.num_bytes, spare=spare, newest=newest)
        if not unit.keeps_memory:
            self._loan.lend(unit.storage, unit.slot)
        if not self._loan.swap:  # other memory than last time, which the current stream may be using still
            unit.slot.last_use = record(self.device)
        return unit.slot

    def finish_gather(self, unit: Unit) -> None:
        """GATHERING to WHOLE: the current stream may use the parameters from here on."""
        unit.gathered.wait()
        unit.end_gather()

    def keep_second(self, unit: Unit) -> None:
        """Copy the part that stays between forward and backward out of a WHOLE unit, where its row has one."""
        for segment in unit.segments:
            if segment.second is not None:
                ops = steps(segment.plan.param_compute, segment.plan.param_between, self._mesh)
                self._interpreter.run(ops, segment.full, segment.second)
                unit.has_second = True
        unit.second_kept = record(self.device)

    def release(self, unit: Unit) -> None:
        """WHOLE to RESTING: the slot goes back, usable once the current stream's work so far is done."""
        assert unit.state is UnitState.WHOLE
        assert unit.slot is not None
        unit.put_to_rest()
        if not unit.keeps_memory:
            self._loan.take_back(unit.storage, unit.slot)
        self._pool.give_back(unit.slot, record(self.device))
        unit.slot = None

    def keep_memory(self, unit: Unit) -> None:
        """Leave a WHOLE unit's values in memory when it is released, until :meth:`drop_memory`. Later gathers write
        there. For the pool nothing changes: what a unit keeps differs between ranks, gathers may not.
        """
        assert unit.slot is not None
        if not unit.keeps_memory:
            unit.keeps_memory = True
            self._pool.leave(unit.slot)

    def drop_memory(self, unit: Unit) -> None:
        """End what :meth:`keep_memory` began. The unit is RESTING."""
        assert unit.state is UnitState.RESTING
        unit.keeps_memory = False
        self._pool.left(unit.storage.nbytes())
        self._loan.drop(unit.storage)

    # -------------------------------------------------------------------- updates

    def publish(self, units: Sequence[Unit], *, ahead: bool = False) -> None:
        """Bring updated master weights, which lie in memory, into what rests: encode, and gather where the rest is
        whole.

        Gathers wait for it, and so does the current stream, unless the caller goes ``ahead``: then whoever uses a
        unit's parameters waits for them, in the order of ``units``.
        """
        if not units:
            return
        updated, ends = record(self.device), list[list[Callable[[], None]]]()

        def begin() -> None:
            updated.wait()
            ends.extend([self._begin_to_publish(segment) for segment in unit.trained] for unit in units)

        def end(number: int) -> None:
            for end_of_segment in ends[number]:
                end_of_segment()
            ends[number].clear()

        self._stream.run(told(begin, "gather", "updated parameters"))
        for number, unit in enumerate(units):
            published = self._stream.run(told(partial(end, number), "gather", "updated parameters"))
            if ahead:
                self.await_update(unit, published)
            else:
                unit.updated = published
        if not ahead:
            with span("wait for gather", "updated parameters"):
                published.wait()

    def _begin_to_publish(self, segment: Segment) -> Callable[[], None]:
        """Return what ends it. Where segments share scratch memory, or are lent memory of another tier than the device,
        one begins when the one before has ended.
        """
        assert segment.master is not None
        master, plan = segment.master.lend().wait(), segment.plan
        publish = self._publish_of(segment)
        if isinstance(publish, RunnablePublish):
            return partial(publish.run, segment, master, self._call)
        begin = partial(store, segment, master, plan.master, self._interpreter)
        return begin().finish if segment.rest.tier is Tier.DEVICE else lambda: begin().finish()

    def run_after(self, event: Event, work: Callable[[], object]) -> Event:
        """Run ``work``, which gathers, in its turn among the gathers, once ``event`` has passed."""

        def run() -> None:
            event.wait()
            work()

        return self._stream.run(run)

    def await_update(self, unit: Unit, updated: Event) -> None:
        """Gathers of the unit wait for ``updated``; so does whoever uses its parameters, where they rest whole."""
        unit.updated = updated
        if unit.rests_whole:
            unit.put_to_rest()
            unit.begin_gather(updated)

    def finish_update(self, unit: Unit) -> None:
        """The current stream may use parameters that rest whole from here on."""
        if unit.rests_whole and unit.state is UnitState.GATHERING:
            with span("wait for update", unit.title):
                self.finish_gather(unit)

    def warm_up(self, is_warming_up: bool) -> None:
        """From the next update on weights are published as in the warm-up, or as later."""
        self._is_warming_up = is_warming_up

    def deliver(self, segment: Segment, values: Tensor, updated: Residence, *, exact: bool = False) -> None:
        """Bring one segment's ``updated`` weights, master or parameters, into the stored ones.

        Args:
            exact: as they are, whatever the row's strategy.
        """
        publish = self._publish_of(segment)
        if not exact and isinstance(publish, RunnablePublish):
            publish.run(segment, values, self._call)
        else:
            store(segment, values, updated, self._interpreter).finish()

    def _publish_of(self, segment: Segment) -> PublishPlan:
        return segment.planned.publishes[0 if self._is_warming_up else -1]

    @property
    def _call(self) -> PublishCall:
        return PublishCall(self._interpreter, self._scratch)
