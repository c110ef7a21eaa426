"""Runs the table's steps on a unit's tensors: gather, release, publish. Knows how, never when."""

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.comm.collectives import Collectives, Handle
from partita.memory.allocate import allocate
from partita.memory.ring import Loan, Ring, Slot
from partita.memory.streams import Event, record
from partita.plan.residence import Residence
from partita.plan.steps import AllGather, Encode, Slice, steps
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
        self._published = Event()

    def can_gather(self, unit: Unit) -> bool:
        """Whether the ring has a slot left for this unit."""
        return self._ring.available(unit.layout.num_bytes)

    def start_gather(self, unit: Unit, spare: bool = False) -> None:
        """RESTING to GATHERING: from the second shard where there is one, else from the shard at rest."""
        assert unit.state is UnitState.RESTING
        slot, published, second = self._lend(unit, spare), self._published, unit.has_second

        def gather() -> None:
            slot.last_use.wait()
            published.wait()
            handles = []
            for segment in unit.segments:
                plan, source, rests = segment.plan, segment.rest, segment.plan.param_rest
                if second and segment.second is not None:
                    unit.second_kept.wait()
                    source, rests = segment.second, plan.param_between
                handles += self._move(source, segment.full, rests, plan.param_compute, unit.number)
            _finish(handles)

        unit.gathered = self._stream.run(gather)
        unit.state = UnitState.GATHERING

    def lay(self, unit: Unit) -> None:
        """Give a new unit its storage: memory of its own where it rests whole, else a slot until it is released."""
        if unit.shards:
            unit.storage = torch.UntypedStorage(0, device=self._mesh.device)
            self._lend(unit).last_use.wait()
            unit.lay(unit.storage)
        else:
            unit.lay(allocate(unit.layout.num_bytes, torch.uint8, self._mesh.device).untyped_storage())

    def _lend(self, unit: Unit, spare: bool = False) -> Slot:
        unit.slot = self._ring.borrow(unit.layout.num_bytes, spare)
        self._loan.lend(unit.storage, unit.slot)
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
                self._move(segment.full, segment.second, segment.plan.param_compute, segment.plan.param_between)
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

    def publish(self, segments: Sequence[Segment]) -> None:
        """Bring updated master weights into what rests: encode, and gather where the rest is whole.

        Gathers wait for it, and so does the current stream.
        """
        updated = record(self._mesh.device)

        def bring() -> None:
            updated.wait()
            handles = []
            for segment in segments:
                assert segment.master is not None
                handles += self._move(segment.master, segment.rest, segment.plan.master, segment.plan.param_rest)
            _finish(handles)

        self._published = self._stream.run(bring)
        self._published.wait()

    def _move(self, source: Tensor, target: Tensor, src: Residence, dst: Residence, tag: int = 0) -> list[Handle]:
        """Run ``steps(src, dst)`` from one flat tensor into another; handles of what is still under way."""
        handles = []
        for op in steps(src, dst, self._mesh.shape):
            if isinstance(op, AllGather):
                handles.append(self._collectives.all_gather(target, source, op.axes, tag=tag))
            elif isinstance(op, Slice):
                target.copy_(source.view(self._mesh.shape.group_size(op.axes), -1)[self._mesh.index(op.axes)])
            elif isinstance(op, Encode):
                num = target.numel() // source.numel()
                part = target.view(num, -1)[self._mesh.index(src.shard_axes) if num > 1 else 0]
                source = part.copy_(source)
            else:
                raise AssertionError(f"parameters never take step {op}")
        return handles


def _finish(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
