"""Runs the table's steps on a unit's tensors: gather, release, publish. Knows how, never when."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from partita.comm.collectives import Collectives
from partita.comm.group import Handle
from partita.memory.allocate import allocate
from partita.memory.ring import Loan, Ring, Slot
from partita.memory.streams import Event, finish, record
from partita.memory.tiers import Kept, Lease
from partita.plan.residence import Residence, Tier
from partita.plan.steps import AllGather, Copy, Encode, Slice, steps
from partita.sharding import resting
from partita.sharding.unit import Segment, Unit, UnitState


class Executor:
    """Moves parameters between the residences of their row.

    Invariants: a unit that is not RESTING holds a slot of the ring (unless it is whole at rest); every slot's memory is
    written only after the event of its last use; a GATHERING unit's parameters are still of class ``Resting``.
    """

    def __init__(self, collectives: Collectives, ring: Ring, loan: Loan) -> None:
        self._collectives, self._ring, self._loan = collectives, ring, loan
        self._mesh = collectives.mesh
        self._stream = self._mesh.stream("parameters")

    @property
    def device(self) -> torch.device:
        return self._mesh.device

    def can_gather(self, unit: Unit) -> bool:
        """Whether the ring has a slot left for this unit."""
        return self._ring.available(unit.layout.num_bytes)

    def start_gather(self, unit: Unit, spare: bool = False) -> None:
        """RESTING to GATHERING: from the second shard where there is one, else from what rests."""
        assert unit.state is UnitState.RESTING
        slot, updated, second = self._lend(unit, spare), unit.updated, unit.has_second

        def gather() -> None:
            slot.last_use.wait()
            updated.wait()
            handles, leases, readings = list[Handle](), list[Lease](), list[Event]()
            for segment in unit.segments:
                plan, source, rests = segment.plan, segment.rest, segment.plan.param_rest
                if second and segment.second is not None:
                    unit.second_kept.wait()
                    source, rests = segment.second, plan.param_between
                copied = all(isinstance(op, Copy) for op in steps(rests, plan.param_compute, self._mesh.shape))
                if copied and (reading := source.read_into(segment.full)) is not None:
                    readings.append(reading)
                    continue
                leases.append(source.lend())
                handles += self._move(leases[-1].wait(), segment.full, rests, plan.param_compute, unit.number)
            _finish(handles)
            for lease in leases:
                lease.end(changed=False)
            for reading in readings:
                reading.wait()

        unit.gathered = self._stream.run(gather)
        unit.state = UnitState.GATHERING

    def lay(self, unit: Unit) -> None:
        """Give a new unit its storage: memory of its own where it rests whole, else a slot until it is released."""
        if unit.travels:
            unit.storage = torch.UntypedStorage(0, device=self._mesh.device)
            self._lend(unit).last_use.wait()
            unit.lay(unit.storage)
        else:
            unit.lay(allocate(unit.layout.num_bytes, torch.uint8, self._mesh.device).untyped_storage())

    def _lend(self, unit: Unit, spare: bool = False) -> Slot:
        unit.slot = self._ring.borrow(unit.layout.num_bytes, spare)
        self._loan.lend(unit.storage, unit.slot)
        if not self._loan.swap:  # other memory than last time, which the current stream may be using still
            unit.slot.last_use = record(self._mesh.device)
        return unit.slot

    def finish_gather(self, unit: Unit) -> None:
        """GATHERING to WHOLE: the current stream may use the parameters from here on."""
        assert unit.state is UnitState.GATHERING
        unit.gathered.wait()
        for member in unit.members:
            resting.wake(member.param, member.kind)
        unit.state = UnitState.WHOLE

    def keep_second(self, unit: Unit) -> None:
        """Copy the part that stays between forward and backward out of a WHOLE unit, where its row has one."""
        for segment in unit.segments:
            if segment.second is not None:
                self._store(segment.full, segment.second, segment.plan.param_compute, segment.plan.param_between)
                unit.has_second = True
        unit.second_kept = record(self._mesh.device)

    def release(self, unit: Unit) -> None:
        """WHOLE to RESTING: the slot goes back, usable once the current stream's work so far is done."""
        assert unit.state is UnitState.WHOLE
        assert unit.slot is not None
        self.put_to_rest(unit)
        self._loan.take_back(unit.storage, unit.slot)
        self._ring.give_back(unit.slot, record(self._mesh.device))
        unit.slot = None

    def put_to_rest(self, unit: Unit) -> None:
        """Mark the unit's parameters as being without data."""
        for member in unit.members:
            resting.rest(member.param)
        unit.state = UnitState.RESTING

    def publish(self, units: Sequence[Unit]) -> None:
        """Bring updated master weights, which lie in memory, into what rests: encode, and gather where the rest is
        whole.

        Gathers wait for it, and so does the current stream.
        """
        updated = record(self._mesh.device)

        def bring() -> None:
            updated.wait()
            under_way = list[Callable[[], None]]()
            for unit in units:
                for segment in unit.trained:
                    assert segment.master is not None
                    master, plan = segment.master.lend().wait(), segment.plan
                    end = self._begin_to_store(master, segment.rest, plan.master, plan.param_rest)
                    if segment.rest.tier is Tier.DEVICE:
                        under_way.append(end)
                    else:  # what is lent for another tier is memory of its own: one at a time
                        end()
            for end in under_way:
                end()

        published = self._stream.run(bring)
        for unit in units:
            unit.updated = published
        published.wait()

    def run_after(self, event: Event, work: Callable[[], object]) -> Event:
        """Run ``work``, which gathers, in its turn among the gathers, once ``event`` has passed."""

        def run() -> None:
            event.wait()
            work()

        return self._stream.run(run)

    def await_update(self, unit: Unit, updated: Event) -> None:
        """Gathers of the unit wait for ``updated``; so does whoever uses its parameters, where they rest whole."""
        unit.updated = updated
        if not unit.travels:
            self.put_to_rest(unit)
            unit.gathered, unit.state = updated, UnitState.GATHERING

    def finish_update(self, unit: Unit) -> None:
        """The current stream may use parameters that rest whole from here on."""
        if not unit.travels and unit.state is UnitState.GATHERING:
            self.finish_gather(unit)

    def deliver(self, segment: Segment, values: Tensor, updated: Residence) -> None:
        """Bring one segment's ``updated`` weights, master or parameters, into what rests."""
        self._store(values, segment.rest, updated, segment.plan.param_rest)

    def _store(self, source: Tensor, target: Kept, src: Residence, dst: Residence) -> None:
        self._begin_to_store(source, target, src, dst)()

    def _begin_to_store(self, source: Tensor, target: Kept, src: Residence, dst: Residence) -> Callable[[], None]:
        """Begin to bring ``source`` into ``target``; returns what ends it."""
        if not steps(src, dst, self._mesh.shape):
            return lambda: None
        lease = target.lend(read=False)
        handles = self._move(source, lease.wait(), src, dst)

        def end() -> None:
            _finish(handles)
            if target.tier is not Tier.DEVICE:  # the host's readers know nothing of streams
                finish(self._mesh.device)
            lease.end(changed=True)

        return end

    def _move(self, source: Tensor, target: Tensor, src: Residence, dst: Residence, tag: int = 0) -> list[Handle]:
        """Run ``steps(src, dst)`` from one flat tensor in memory into another; handles of what is still under way.

        What rests on disk is lent, so reading and writing is done by whoever lends it.
        """
        ops = steps(src, dst, self._mesh.shape)
        if target.device != self._mesh.device and any(isinstance(op, AllGather) for op in ops):
            whole = torch.empty_like(target, device=self._mesh.device)
            _finish(self._move(source, whole, src, replace(dst, tier=Tier.DEVICE), tag))
            target.copy_(whole)
            return []
        handles = []
        for op in ops:
            if isinstance(op, AllGather):
                handles.append(self._collectives.group(op.axes).all_gather(target, source, tag=tag))
            elif isinstance(op, Slice):
                source = source.view(self._mesh.shape.group_size(op.axes), -1)[self._mesh.index(op.axes)]
            elif isinstance(op, Encode | Copy):
                num = target.numel() // source.numel()
                part = target.view(num, -1)[self._mesh.index(src.shard_axes) if num > 1 else 0]
                source = part if part.data_ptr() == source.data_ptr() else part.copy_(source, non_blocking=True)
        if not handles and source.data_ptr() != target.data_ptr():
            target.copy_(source)
        return handles


def _finish(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
