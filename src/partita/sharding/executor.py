"""Moves a unit's parameters between the residences of its row: gather, release, publish. Knows how, never when."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.exchange import Work
from partita.memory.allocate import allocate
from partita.memory.buffer_pool import BufferPool, Loan, Slot
from partita.memory.streams import Event, finish, record
from partita.memory.tiers import Kept, Lease
from partita.memory.timeline import span, told
from partita.plan.residence import Residence, Tier
from partita.plan.steps import AllGather, Copy, Read, steps
from partita.sharding.coded import gather_changes
from partita.sharding.movement import Movement, finish_all
from partita.sharding.unit import Segment, Unit, UnitState


class Executor:
    """Gathers, releases and publishes units.

    Invariants: a unit that is not RESTING holds a slot of the pool (unless it rests whole); every slot's memory is
    written only after the event of its last use; a GATHERING unit's parameters are still of class ``Resting``.

    Args:
        codes: memory for those that a unit's parameters come in, or their changes, where any do. Units are gathered
            one after the other.
    """

    def __init__(self, collectives: Collectives, pool: BufferPool, loan: Loan, codes: Tensor | None = None) -> None:
        self._movement = Movement(collectives)
        self._pool = pool
        self._loan = loan
        self._codes = codes
        self._mesh = collectives.mesh.shape
        self._stream = collectives.mesh.stream("parameters")
        self.device = collectives.mesh.device
        self.is_warming_up = False  # other codes of changes travel, or none

    def can_gather(self, unit: Unit) -> bool:
        """Whether the pool has a slot left for this unit."""
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
            handles, leases, readings = list[Work](), list[Lease](), list[Event]()
            codes = self._codes
            for segment in unit.segments:
                plan, source = segment.plan, segment.rest
                ops = steps(plan.param_rest, plan.param_compute, self._mesh) if exact else segment.planned.gathers
                if second and segment.second is not None:
                    unit.second_kept.wait()
                    source, ops = segment.second, steps(plan.param_between, plan.param_compute, self._mesh)
                is_copied = all(isinstance(op, Read | Copy) for op in ops)
                if is_copied and (reading := source.read_into(segment.full)) is not None:
                    readings.append(reading)
                    continue
                leases.append(source.lend())
                handles += self._movement.begin(ops, leases[-1].wait(), segment.full, tag=unit.number, received=codes)
                if codes is not None:
                    codes = codes[segment.planned.gathered_code_bytes :]
            finish_all(handles)
            for lease in leases:
                lease.end(changed=False)
            for reading in readings:
                reading.wait()

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
                self._store(segment.full, segment.second, segment.plan.param_compute, segment.plan.param_between)
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
        """Returns what ends it. Codes share memory, and what is lent for another tier than the device is memory of its
        own: there one segment begins when the one before has ended.
        """
        assert segment.master is not None
        master, plan = segment.master.lend().wait(), segment.plan
        if (step := self._step_of_changes(segment)) is not None:
            return partial(self._send_changes, segment, master, step)
        if segment.rest.tier is not Tier.DEVICE:
            return partial(self._store, master, segment.rest, plan.master, plan.param_rest)
        return self._begin_to_store(master, segment.rest, plan.master, plan.param_rest)

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

    def deliver(self, segment: Segment, values: Tensor, updated: Residence, *, exact: bool = False) -> None:
        """Bring one segment's ``updated`` weights, master or parameters, into what rests; ``exact``: as they are, also
        where codes of their changes travel.
        """
        if not exact and (step := self._step_of_changes(segment)) is not None:
            self._send_changes(segment, values, step)
            return
        if segment.by_kernels and values.dtype != segment.dtype:  # moved as it is, it would be rounded as torch does
            values, updated = segment.rounded(values), replace(updated, encoding=segment.layout.encoding)
            if not steps(updated, segment.plan.param_rest, self._mesh):
                segment.rest.store(values)
                return
        self._store(values, segment.rest, updated, segment.plan.param_rest)

    def _step_of_changes(self, segment: Segment) -> AllGather | None:
        """How codes of a segment's changes travel in this step, where they do."""
        planned = segment.planned
        ops = planned.warmup_publication if self.is_warming_up else planned.publication
        return next((op for op in ops if isinstance(op, AllGather) and op.wire.is_coded), None)

    def _send_changes(self, segment: Segment, values: Tensor, step: AllGather) -> None:
        assert self._codes is not None
        group, rest = self._movement.group(step.axes), segment.rest.lend()
        gather_changes(group, step.wire, values.to(self.device), rest.wait(), self._codes)
        rest.end(changed=True)

    def _store(self, source: Tensor, target: Kept, src: Residence, dst: Residence) -> None:
        self._begin_to_store(source, target, src, dst)()

    def _begin_to_store(self, source: Tensor, target: Kept, src: Residence, dst: Residence) -> Callable[[], None]:
        """Begin to bring ``source`` into ``target``; returns what ends it."""
        ops = steps(src, dst, self._mesh)
        if not ops:
            return lambda: None
        lease = target.lend(read=False)
        handles = self._movement.begin(ops, source, lease.wait())

        def end() -> None:
            finish_all(handles)
            if target.tier is not Tier.DEVICE:  # the host's readers know nothing of streams
                finish(self.device)
            lease.end(changed=True)

        return end
