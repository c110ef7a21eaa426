"""A unit: the parameters that are gathered and released together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from partita.memory.allocate import allocate, over
from partita.memory.buffer_pool import BufferPool, Loan, Slot
from partita.memory.step_events import span, told
from partita.memory.streams import Event, Stream, record
from partita.plan.planned import PlannedUnit
from partita.plan.steps import steps
from partita.planner.parameters import Holding
from partita.sharding.interpreter import Interpreter, Running
from partita.sharding.parameter import Member, replace_data
from partita.sharding.placeholder import mark_sharded, restore_class
from partita.sharding.segment import Segment


class UnitState(Enum):
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class UnitResources:
    """The resources that the units of an engine share.

    Attributes:
        pool: memory for unsharded parameters; ``loan`` lends its slots to the units' storages.
        stream: gathers run on it, in one order.
        scratch: memory of :func:`~partita.plan.slots.unshard_scratch_bytes`, if any is needed.
    """

    interpreter: Interpreter
    pool: BufferPool
    loan: Loan
    stream: Stream
    scratch: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the parameters in compute."""
        return self.interpreter.device


class Unit:
    """The parameters of one module (without those of units inside it), and their state.

    A unit is SHARDED until it is gathered, UNSHARDED while anyone has it open, and then gives its slot of the buffer
    pool back. One that is never sharded is UNSHARDED, except while an update of it is under way.

    Invariants: a unit that is not SHARDED holds a slot of the pool (unless it is never sharded); every slot's memory is
    written only after the event of its last use; an UNSHARDING unit's parameters are still of class
    ``ShardedParameter``.
    """

    def __init__(
        self,
        planned: PlannedUnit,
        module: nn.Module,
        holdings: Mapping[str, Holding],
        number: int,
        rank: int,
        resources: UnitResources,
        *,
        by_kernels: bool = False,
    ) -> None:
        self._resources = resources
        self.planned = planned
        self.name = planned.name
        self.module = module
        self.segments = [Segment(segment, rank, by_kernels=by_kernels) for segment in planned.segments]
        self.number = number  # among all units of a mesh, once it is under one
        self.members = [
            Member(holdings[span.fqn], span, segment) for segment in self.segments for span in segment.layout.spans
        ]
        self.always_unsharded = planned.always_unsharded
        self.state = UnitState.UNSHARDED
        self.open_calls = 0  # open forwards and backwards
        self.holds = 0  # blocks of engine.gathered
        self.is_exact = False  # whole as it rests, also where it is computed with as decoded
        self.pinned = False
        self.has_secondary = False
        self.secondary_kept = Event()
        self.slot: Slot | None = None
        self.keeps_memory = False  # what was gathered stays in memory after its release, for graphs that refer to it
        self.gathered = Event()
        self.updated = Event()  # passes when what rests has the values of the last update
        self.storage = torch.UntypedStorage(0)  # until it is laid out

    @property
    def trained(self) -> list[Segment]:
        """The segments that the optimizer updates."""
        return [segment for segment in self.segments if segment.trains and segment.master is not None]

    @property
    def stays_unsharded(self) -> bool:
        """True if the row keeps the unit unsharded between forward and backward."""
        return self.planned.stays_unsharded

    @property
    def in_use(self) -> bool:
        """True if the unit must stay unsharded."""
        return self.open_calls > 0 or self.holds > 0 or self.pinned

    @property
    def title(self) -> str:
        """The unit's name in messages."""
        return self.name or f"{type(self.module).__name__} (root)"

    # ------------------------------------------------------------------ gathering

    @property
    def can_unshard(self) -> bool:
        """True if the pool has a slot left for this unit."""
        return self._resources.pool.available(self.planned.num_bytes)

    def start_unshard(self, spare: bool = False, exact: bool = False) -> None:
        """SHARDED to UNSHARDING: from the second shard where there is one, else from what rests.

        Args:
            spare: memory beyond the pool's may serve.
            exact: as it rests, also where what is computed with is decoded.
        """
        self.is_exact = exact
        slot, updated, second = self._lend_slot(spare=spare), self.updated, self.has_secondary and not exact

        def gather() -> None:
            slot.last_use.wait()
            updated.wait()
            gathers, scratch = list[Running](), self._resources.scratch
            for segment in self.segments:
                plan, source, planned = segment.plan, segment.rest, segment.planned
                ops = steps(plan.param_rest, plan.param_compute, segment.mesh) if exact else planned.unshards
                if second and segment.secondary is not None:
                    self.secondary_kept.wait()
                    source, ops = segment.secondary, steps(plan.param_between, plan.param_compute, segment.mesh)
                begin = self._resources.interpreter.begin
                gathers.append(begin(ops, source, segment.full, tag=self.number, scratch=scratch))
                if scratch is not None:
                    scratch = scratch[planned.scratch_bytes :]
            for begun in gathers:
                begun.finish()

        self._await(self._resources.stream.run(told(gather, "gather", self.title)))

    def finish_unshard(self) -> None:
        """UNSHARDING to UNSHARDED: the current stream may use the parameters from here on."""
        assert self.state is UnitState.UNSHARDING
        self.gathered.wait()
        for member in self.members:
            restore_class(member.param, member.here_kind)
        self.state = UnitState.UNSHARDED

    def keep_secondary(self) -> None:
        """Copy the part that stays between forward and backward out of an UNSHARDED unit, where its row has one."""
        for segment in self.segments:
            if segment.secondary is not None:
                ops = steps(segment.plan.param_compute, segment.plan.param_between, segment.mesh)
                self._resources.interpreter.run(ops, segment.full, segment.secondary)
                self.has_secondary = True
        self.secondary_kept = record(self._resources.device)

    def reshard(self) -> None:
        """UNSHARDED to SHARDED: the slot goes back, usable once the current stream's work so far is done."""
        assert self.state is UnitState.UNSHARDED
        assert self.slot is not None
        self._mark_sharded()
        if not self.keeps_memory:
            self._resources.loan.take_back(self.storage, self.slot)
        self._resources.pool.give_back(self.slot, record(self._resources.device))
        self.slot = None

    def keep_memory(self) -> None:
        """Leave an UNSHARDED unit's values in memory when it is released, until :meth:`drop_memory`. Later gathers
        write there. For the pool nothing changes: what a unit keeps differs between ranks, gathers may not.
        """
        assert self.slot is not None
        if not self.keeps_memory:
            self.keeps_memory = True
            self._resources.pool.leave(self.slot)

    def drop_memory(self) -> None:
        """End what :meth:`keep_memory` began. The unit is SHARDED."""
        assert self.state is UnitState.SHARDED
        self.keeps_memory = False
        self._resources.pool.left(self.storage.nbytes())
        self._resources.loan.drop(self.storage)

    def _lend_slot(self, *, spare: bool = False, newest: bool = False) -> Slot:
        resources = self._resources
        slot = self.slot = resources.pool.borrow(self.planned.num_bytes, spare=spare, newest=newest)
        if not self.keeps_memory:
            resources.loan.lend(self.storage, slot)
        if not resources.loan.swap:  # other memory than last time, which the current stream may be using still
            slot.last_use = record(resources.device)
        return slot

    def _mark_sharded(self) -> None:
        """To SHARDED: the parameters have no data from here on."""
        for member in self.members:
            mark_sharded(member.param, member.sharded_kind)
        self.state = UnitState.SHARDED

    def _await(self, gathered: Event) -> None:
        """SHARDED to UNSHARDING: the data is there when ``gathered`` has passed."""
        assert self.state is UnitState.SHARDED
        self.gathered = gathered
        self.state = UnitState.UNSHARDING

    # -------------------------------------------------------------------- updates

    def await_update(self, updated: Event) -> None:
        """Gathers of the unit wait for ``updated``; so does whoever uses its parameters, where they rest whole."""
        self.updated = updated
        if self.always_unsharded:
            self._mark_sharded()
            self._await(updated)

    def finish_update(self) -> None:
        """The current stream may use parameters that rest whole from here on."""
        if self.always_unsharded and self.state is UnitState.UNSHARDING:
            with span("wait for update", self.title):
                self.finish_unshard()

    # ------------------------------------------------------------------- the start

    def allocate(self) -> None:
        """Give a new unit its storage: memory of its own where it is never sharded, else a slot until it is
        resharded.
        """
        device = self._resources.device
        if self.always_unsharded:
            storage = allocate(self.planned.num_bytes, torch.uint8, device).untyped_storage()
        else:
            storage = self.storage = torch.UntypedStorage(0, device=device)
            self._lend_slot(newest=True).last_use.wait()
        self._lay_out(storage, [segment.dtype for segment in self.segments])

    def allocate_wide(self) -> None:
        """Lay ``full`` of every segment in the dtype of its first values, into memory of its own."""
        dtypes = [segment.first_dtype for segment in self.segments]
        num_bytes = sum(s.layout.padded * dtype.itemsize for s, dtype in zip(self.segments, dtypes, strict=True))
        self._lay_out(allocate(num_bytes, torch.uint8, self._resources.device).untyped_storage(), dtypes)

    def _lay_out(self, storage: torch.UntypedStorage, dtypes: Sequence[torch.dtype]) -> None:
        self.storage, offset = storage, 0
        for segment, dtype in zip(self.segments, dtypes, strict=True):
            segment.full = over(storage, dtype, segment.layout.padded, offset // dtype.itemsize)
            segment.full.zero_()
            offset += segment.layout.padded * dtype.itemsize

    def adopt(self, member: Member) -> None:
        """Copy this rank's share of a parameter's values into ``full`` and make the parameter a view of it, giving its
        own memory back.
        """
        param, place = member.param, member.span.place
        view = member.within(member.segment.full)
        with torch.no_grad():
            if not param.is_meta:
                view.copy_(place.take(param) if place.is_part else param)
        if param.is_meta or param.device != view.device or param.dtype != view.dtype:
            replace_data(param, view)
        else:
            param.data = view

    def move(self, member: Member) -> None:
        """Make a parameter, which the unit has adopted, a view of ``full`` where that was laid anew."""
        replace_data(member.param, member.within(member.segment.full))

    def give_back(self, member: Member) -> bool:
        """Give a parameter memory of its own again, of the dtype and on the device that it had; whether the unit had
        adopted it (and is whole, then).
        """
        view = member.param.data
        if view.untyped_storage()._cdata != self.storage._cdata:
            return False
        replace_data(member.param, view.to(member.own_device, member.own_dtype, copy=True))
        return True
