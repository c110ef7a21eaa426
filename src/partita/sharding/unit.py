"""A unit: the parameters that are unsharded and resharded together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from partita.layout.parameters import ParameterInfo
from partita.memory.allocate import allocate, over
from partita.memory.buffer_pool import BufferPool, Slot, StorageSwap
from partita.memory.step_events import in_span, span
from partita.memory.streams import Event, Stream, record
from partita.sharding.interpreter import Interpreter, Running
from partita.sharding.parameter import Member, replace_data
from partita.sharding.placeholder import get_data, mark_sharded, restore_class, set_data
from partita.sharding.segment import Segment
from partita.table.planned import PlannedUnit
from partita.table.steps import steps


class UnitState(Enum):
    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class UnitResources:
    """The resources that the units of an engine share.

    Attributes:
        pool: memory for unsharded parameters.
        loan: attaches the pool's slots to the units' storages.
        stream: the stream of all gathers.
        scratch: memory of :func:`~partita.table.slots.unshard_scratch_bytes`, or None.
    """

    interpreter: Interpreter
    pool: BufferPool
    loan: StorageSwap
    stream: Stream
    scratch: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The device of the parameters in compute."""
        return self.interpreter.device


class Unit:
    """The parameters of one module (without those of units inside it), and their state.

    A unit is SHARDED, UNSHARDING during its all-gather, and UNSHARDED while it is in use; then it gives its slot back
    to the buffer pool. A unit that is always unsharded is UNSHARDED, except while its update is under way.

    Invariants: a unit that is not SHARDED has a slot of the pool (unless it is always unsharded); a slot's memory is
    written only after the event of its last use; parameters of an UNSHARDING unit still have class
    ``ShardedParameter``.
    """

    def __init__(
        self,
        planned: PlannedUnit,
        module: nn.Module,
        infos: Mapping[str, ParameterInfo],
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
        self.number = number  # unique among all units of a mesh
        self.members = [
            Member(infos[span.fqn], span, segment) for segment in self.segments for span in segment.layout.spans
        ]
        self.always_unsharded = planned.always_unsharded
        self.state = UnitState.UNSHARDED
        self.open_calls = 0  # running forwards and backwards
        self.holds = 0  # running blocks of engine.gathered
        self.is_exact = False  # unsharded with the exact stored values, even if compute uses quantized ones
        self.pinned = False
        self.has_secondary = False
        self.secondary_kept = Event()
        self.slot: Slot | None = None
        self.keeps_memory = False  # unsharded values stay in memory after resharding, for graphs that refer to them
        self.gathered = Event()
        self.updated = Event()  # passes when the stored parameters have the values of the last update
        self.storage = torch.UntypedStorage(0)  # until allocate()

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

    def name_of(self, param: nn.Parameter) -> str:
        """Return the name of one of the unit's parameters."""
        return next(member.fqn for member in self.members if member.param is param)

    # ----------------------------------------------------------------- unsharding

    @property
    def can_unshard(self) -> bool:
        """True if the pool has a free slot for this unit."""
        return self._resources.pool.available(self.planned.num_bytes)

    def start_unshard(self, spare: bool = False, exact: bool = False, changed: Event | None = None) -> None:
        """Change from SHARDED to UNSHARDING: start to gather the secondary shards if there are any, else the stored
        ones.

        Args:
            spare: allow memory beyond the pool.
            exact: gather the exact stored values, even if compute uses quantized ones.
            changed: passes when values that were written outside of updates are stored.
        """
        self.is_exact = exact
        slot, updated, from_secondary = self._attach_slot(spare=spare), self.updated, self.has_secondary and not exact

        def gather() -> None:
            slot.last_use.wait()
            if changed is not None:
                changed.wait()
            updated.wait()
            gathers, scratch = list[Running](), self._resources.scratch
            for segment in self.segments:
                plan, source, planned = segment.plan, segment.stored, segment.planned
                ops = steps(plan.param_stored, plan.param_compute, segment.mesh) if exact else planned.unshards
                if from_secondary and segment.secondary is not None:
                    self.secondary_kept.wait()
                    source, ops = segment.secondary, steps(plan.param_between, plan.param_compute, segment.mesh)
                begin = self._resources.interpreter.begin
                gathers.append(begin(ops, source, segment.full, tag=self.number, scratch=scratch))
                if scratch is not None:
                    scratch = scratch[planned.scratch_bytes :]
            for begun in gathers:
                begun.finish()

        self._begin_unsharding(self._resources.stream.run(in_span(gather, "gather", self.title)))

    def finish_unshard(self) -> None:
        """Change from UNSHARDING to UNSHARDED: the current stream may use the parameters from now on."""
        assert self.state is UnitState.UNSHARDING
        self.gathered.wait()
        for member in self.members:
            restore_class(member.param, member.unsharded_kind)
        self.state = UnitState.UNSHARDED

    def keep_secondary(self) -> None:
        """Copy the secondary shards out of an UNSHARDED unit, if its row has them."""
        for segment in self.segments:
            if segment.secondary is not None:
                ops = steps(segment.plan.param_compute, segment.plan.param_between, segment.mesh)
                self._resources.interpreter.run(ops, segment.full, segment.secondary)
                self.has_secondary = True
        self.secondary_kept = record(self._resources.device)

    def reshard(self) -> None:
        """Change from UNSHARDED to SHARDED: return the slot, which is free after the current stream's work so far."""
        assert self.state is UnitState.UNSHARDED
        assert self.slot is not None
        self._mark_sharded()
        if not self.keeps_memory:
            self._resources.loan.detach(self.storage, self.slot)
        self._resources.pool.give_back(self.slot, record(self._resources.device))
        self.slot = None

    def keep_memory(self) -> None:
        """Keep an UNSHARDED unit's values in memory after resharding, until :meth:`drop_memory`.

        Later gathers write there. The pool counts the slot as returned: ranks may keep different units, but must start
        the same gathers.
        """
        assert self.slot is not None
        if not self.keeps_memory:
            self.keeps_memory = True
            self._resources.pool.transfer(self.slot)

    def drop_memory(self) -> None:
        """Free the memory of :meth:`keep_memory`. The unit is SHARDED."""
        assert self.state is UnitState.SHARDED
        self.keeps_memory = False
        self._resources.pool.transfer_freed(self.storage.nbytes())
        self._resources.loan.drop(self.storage)

    def _attach_slot(self, *, spare: bool = False, newest: bool = False) -> Slot:
        resources = self._resources
        slot = self.slot = resources.pool.borrow(self.planned.num_bytes, spare=spare, newest=newest)
        if not self.keeps_memory:
            resources.loan.attach(self.storage, slot)
        if not resources.loan.swap:  # other memory than last time, which the current stream may be using still
            slot.last_use = record(resources.device)
        return slot

    def _mark_sharded(self) -> None:
        """Change to SHARDED: the parameters have no data from now on."""
        for member in self.members:
            mark_sharded(member.param, member.sharded_kind)
        self.state = UnitState.SHARDED

    def _begin_unsharding(self, gathered: Event) -> None:
        """Change from SHARDED to UNSHARDING: the parameters have data once ``gathered`` has passed."""
        assert self.state is UnitState.SHARDED
        self.gathered = gathered
        self.state = UnitState.UNSHARDING

    # -------------------------------------------------------------------- updates

    def await_update(self, updated: Event) -> None:
        """Make gathers of the unit wait for ``updated``, and, if it is always unsharded, each use of its parameters."""
        self.updated = updated
        if self.always_unsharded:
            self._mark_sharded()
            self._begin_unsharding(updated)

    def finish_update(self) -> None:
        """Wait for the update of an always unsharded unit: the current stream may use its parameters from now on."""
        if self.always_unsharded and self.state is UnitState.UNSHARDING:
            with span("wait for update", self.title):
                self.finish_unshard()

    # ------------------------------------------------------------- initialization

    def allocate(self) -> None:
        """Allocate a new unit's storage: its own memory if it is always unsharded, else a slot until it reshards."""
        device = self._resources.device
        if self.always_unsharded:
            storage = allocate(self.planned.num_bytes, torch.uint8, device).untyped_storage()
        else:
            storage = self.storage = torch.UntypedStorage(0, device=device)
            self._attach_slot(newest=True).last_use.wait()
        self._create_flat_buffers(storage, [segment.dtype for segment in self.segments])

    def allocate_wide(self) -> None:
        """Allocate ``full`` of every segment in the dtype of its initial values, in separate memory."""
        dtypes = [segment.first_dtype for segment in self.segments]
        num_bytes = sum(s.layout.padded * dtype.itemsize for s, dtype in zip(self.segments, dtypes, strict=True))
        self._create_flat_buffers(allocate(num_bytes, torch.uint8, self._resources.device).untyped_storage(), dtypes)

    def _create_flat_buffers(self, storage: torch.UntypedStorage, dtypes: Sequence[torch.dtype]) -> None:
        self.storage, offset = storage, 0
        for segment, dtype in zip(self.segments, dtypes, strict=True):
            segment.full = over(storage, dtype, segment.layout.padded, offset // dtype.itemsize)
            segment.full.zero_()
            offset += segment.layout.padded * dtype.itemsize

    def move_to_buffer(self, member: Member) -> None:
        """Copy this rank's slice of a parameter into ``full``, and make the parameter a view of it. This frees the
        parameter's own memory.
        """
        param, place = member.param, member.span.place
        view = member.within(member.segment.full)
        with torch.no_grad():
            if not param.is_meta:
                view.copy_(place.take(param) if place.is_part else param)
        if param.is_meta or param.device != view.device or param.dtype != view.dtype:
            replace_data(param, view)
        else:
            set_data(param, view)

    def move(self, member: Member) -> None:
        """Make a parameter of the unit a view of ``full`` again, after ``full`` was reallocated."""
        replace_data(member.param, member.within(member.segment.full))

    def restore_parameter(self, member: Member) -> bool:
        """Give a parameter its own memory again, with its original dtype and device. The unit is unsharded.

        Returns: False if the parameter is not a view of the unit's storage.
        """
        view = get_data(member.param)
        if view.untyped_storage()._cdata != self.storage._cdata:
            return False
        replace_data(member.param, view.to(member.own_device, member.own_dtype, copy=True))
        return True
