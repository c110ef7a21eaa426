"""A unit at rest and whole: the parameters that are gathered and released together.

Names used everywhere: a segment's ``full`` is the flat buffer of all its parameters in the compute encoding, which the
user's ``nn.Parameter`` objects are permanent views of; ``rest`` is what stays of it between steps (``full`` itself, or
this rank's part); ``second`` is the part kept beside it between forward and backward (hierarchical); ``master`` holds
the values that the optimizer updates, and is ``rest``, or a part of it, wherever their encodings are the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

from partita.kernels.chunks import chunks
from partita.kernels.quantize import nearest_bf16
from partita.memory.allocate import allocate, over
from partita.memory.buffer_pool import Slot
from partita.memory.streams import Event
from partita.memory.tiers import InMemory, Kept, StateMemory
from partita.plan.flat_range import FlatRange, memory_order
from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.residence import Residence
from partita.plan.span import Span
from partita.planner.dtypes import dtype_of
from partita.planner.parameters import Holding
from partita.sharding import resting
from partita.sharding.collected import Collected
from partita.sharding.master import MasterWeights


class UnitState(Enum):
    RESTING = "resting"
    GATHERING = "gathering"
    WHOLE = "whole"


@dataclass
class Member:
    """One parameter of a unit: the user's object, its names, and where its values lie. ``shape`` and ``stride`` are the
    local tensor's, which the parameter is once the unit has adopted it.
    """

    holding: Holding
    span: Span
    segment: "Segment"
    param: nn.Parameter = field(init=False)
    kind: type[nn.Parameter] = field(init=False)
    here_kind: type[nn.Parameter] = field(init=False)  # the parameter's class while its data is here
    resting_kind: type[resting.Resting] = resting.Resting
    whole_kind: type[nn.Parameter] = nn.Parameter  # while it has whole values of a parameter that ranks hold in parts
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    own_dtype: torch.dtype = field(init=False)  # before the unit adopted it
    own_device: torch.device = field(init=False)
    hooked: bool = False
    _collected: Collected | None = None

    def __post_init__(self) -> None:
        self.param = param = self.holding.param
        place = self.span.place
        self.kind = self.here_kind = type(param)
        self.shape = torch.Size(place.sizes)
        self.stride = place.stride if place.is_part else dense_stride(param)
        self.own_dtype = param.dtype
        self.own_device = param.device

    @property
    def fqn(self) -> str:
        return self.holding.fqns[0]

    @property
    def rounded(self) -> bool:
        """True if values were cast to a dtype with fewer digits."""
        own, compute = self.own_dtype, self.segment.dtype
        return self.own_device.type != "meta" and own != compute and own.itemsize >= compute.itemsize

    @property
    def is_cut(self) -> bool:
        """True if the user's object is a part of the global parameter now."""
        place = self.span.place
        with torch._C.DisableTorchFunctionSubclass():  # which would answer for the whole one
            return place.sizes != place.shape and self.param.shape == self.shape

    @property
    def grad(self) -> Tensor | None:
        """The gradient that autograd left with the parameter, if it is there still."""
        grad = self.param.grad
        return None if isinstance(grad, Collected) else grad

    def cover(self) -> None:
        """Say so where somebody looks for a gradient that was collected."""
        if self.param.grad is None:
            if self._collected is None:
                with torch._C.DisableTorchFunctionSubclass():  # which would answer for the whole one
                    self._collected = Collected(self.param, self.fqn)
            self.param.grad = self._collected

    def uncover(self) -> None:
        """Leave in ``.grad`` only what autograd has put there."""
        grad = self.param.grad
        if isinstance(grad, Collected):
            self.param.grad = grad.added
            grad.added = None

    def leave(self, values: Tensor) -> None:
        """Make the parameter one of no unit: its own class, with ``values`` of its shape, wherever the unit is."""
        resting.wake(self.param, self.kind)
        self.param.data = values

    def elements(self, start: int, stop: int) -> FlatRange:
        """Elements ``[start, stop)`` in this parameter's stride order, as a piece of the global parameter."""
        return FlatRange(self.span.place, memory_order(self.stride), start, stop)

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of ``flat`` ``[numel]`` (in this parameter's stride order) with this parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def within(self, whole: Tensor) -> Tensor:
        """The parameter's part of a tensor that has all of its segment, in its shape."""
        return self.shaped(whole[self.span.offset :][: self.span.num_elements])

    @property
    def values(self) -> Tensor:
        """This rank's values of the parameter, flat, where its unit is whole."""
        return self.segment.full[self.span.offset :][: self.span.num_elements]

    def flat(self, values: Tensor) -> Tensor:
        """``values`` of this parameter's shape as ``[numel]`` in its stride order; a view where strides agree."""
        if values.stride() != self.stride:
            values = torch.empty_strided(self.shape, self.stride, dtype=values.dtype, device=values.device).copy_(
                values
            )
        return values.as_strided((values.numel(),), (1,), values.storage_offset())


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides if they fill memory without gaps, else those of a contiguous tensor."""
    order = sorted(range(tensor.dim()), key=tensor.stride)
    expected = 1
    for dim in order:
        if tensor.size(dim) > 1 and tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.size(dim)
    return tensor.stride()


class Segment:
    """One flat buffer of a unit and what rests of it. ``plan`` is its row of the table.

    Args:
        by_kernels: the optimizer writes the parameters by :mod:`partita.kernels`.
    """

    def __init__(self, planned: PlannedSegment, rank: int, *, by_kernels: bool = False) -> None:
        self.planned = planned
        self.by_kernels = by_kernels
        self.layout = planned.layout
        self.plan = planned.row
        self.mesh = planned.mesh
        self._rank = rank
        self.part_index = planned.mesh.group_index(rank, planned.row.part_axes)  # of the layout's parts, this rank's
        self.full: Tensor
        self.rest: Kept
        self.master: MasterWeights | None = None
        self.second: Kept | None = None
        self.trains = planned.trains

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.layout.encoding)

    @property
    def holds_whole_master(self) -> bool:
        return self.planned.num_shards(self.plan.master) == 1

    @property
    def is_first_copy(self) -> bool:
        """True if this rank saves its part, of the ranks that have the same."""
        return self.planned.is_first_copy(self._rank)

    @property
    def is_first_of_replica(self) -> bool:
        """True if this rank measures its part, of the ranks of its replica that have the same."""
        return self.planned.is_first_of_replica(self._rank)

    @property
    def master_spans(self) -> tuple[Span, ...]:
        """The spans of this rank's master weights, with offsets in ``master``; where it has all, also empty ones."""
        return self._spans_of(self.plan.master)

    @property
    def rest_spans(self) -> tuple[Span, ...]:
        """The spans of the parameters that rest on this rank, with offsets in ``rest``; where all do, also empty
        ones.
        """
        return self._spans_of(self.plan.param_rest)

    def _spans_of(self, residence: Residence) -> tuple[Span, ...]:
        is_whole = self.planned.num_shards(residence) == 1
        return self.layout.spans if is_whole else self.planned.spans_of(residence, self._rank)

    def part(self, whole: Tensor, residence: Residence) -> Tensor:
        """This rank's part of a whole flat tensor (all of it where the residence is not sharded)."""
        parts = whole.view(self.planned.num_shards(residence), -1)
        return parts[self.mesh.group_index(self._rank, residence.shard_axes)]

    @property
    def keeps_one_part(self) -> bool:
        """True if one of the layout's parts is all that is stored."""
        num_shards = self.planned.num_shards(self.plan.param_rest)
        return num_shards == self.layout.num_parts and not self.planned.has_second

    @property
    def first_dtype(self) -> torch.dtype:
        """The dtype of the first values: that of the master weights where these have more digits than ``full``."""
        return torch.float32 if self.layout.has_master and self.master_has_digits else self.dtype

    @property
    def master_has_digits(self) -> bool:
        """True if master weights keep digits that the parameters in compute lack."""
        return self.dtype in (torch.bfloat16, torch.float16) and not self.master_is_parameter

    @property
    def keeps_digits(self) -> bool:
        """True if there are master weights with digits that the parameters in compute lack."""
        return self.master is not None and self.master_has_digits

    def rounded(self, values: Tensor) -> Tensor:
        """Return parameters for ``values`` of :attr:`first_dtype`, in the dtype of ``full``.

        They are those that an update would write: torch rounds a value half-way between two bf16 numbers to the even
        one, and the kernels of this package round it away from zero.
        """
        if not self.by_kernels or self.dtype != torch.bfloat16 or values.dtype != torch.float32:
            return values.to(self.dtype)
        rounded = torch.empty_like(values, dtype=self.dtype)
        for at in chunks(values):
            rounded.view(-1)[at] = nearest_bf16(values.reshape(-1)[at])
        return rounded

    def keep_rest(self, memory: StateMemory, first: Tensor | None = None, *, is_part: bool = False) -> None:
        """Keep what rests, and the master weights.

        Args:
            first: values in :attr:`first_dtype`: all of them, which ``full`` has as well (None: those), or the one part
                that rests.
            is_part: ``first`` is that part; ``full`` has no values.
        """
        row = self.plan
        first = self.full if first is None else first
        if is_part:
            self.rest = memory.keep_values("parameters", self.rounded(first), self.dtype, row.param_rest.tier)
        elif self.planned.rests_whole:
            self.rest = memory.adopt("parameters", self.full)
        else:
            self.rest = self._keep_part(row.param_rest, memory)
        if self.planned.has_second:
            self.second = self._keep_part(row.param_between, memory)
        if self.master_is_parameter or self.layout.has_master:
            self.make_master(memory, first if first.dtype != self.dtype else None)

    def _keep_part(self, residence: Residence, memory: StateMemory) -> Kept:
        return memory.keep_values("parameters", self.part(self.full, residence), self.dtype, residence.tier)

    @property
    def master_is_parameter(self) -> bool:
        """True if the master weights are the stored parameters, or this rank's part of them."""
        return self.planned.master_is_parameter

    def make_master(self, memory: StateMemory, first: Tensor | None = None) -> MasterWeights:
        """Make the master weights: the memory of the parameters at rest where the table says so, else their own.

        Args:
            first: values in fp32, all or those of the part that rests (None: the values that rest).
        """
        residence = self.plan.master
        num_elements = self.layout.padded // self.planned.num_shards(residence)
        if self.master_is_parameter and self.rest.num_elements == num_elements:
            self.master = MasterWeights(self.rest, residence, self.master_spans)
            return self.master
        lease = self.rest.lend()
        values = self.part_of_rest(lease.wait())
        if self.master_is_parameter:
            self.master = MasterWeights(InMemory(values, self.rest.tier), residence, self.master_spans)
        else:
            exact = values if first is None else self.part_of_rest(first)
            self.master = MasterWeights.apart(exact, residence, self.master_spans, memory)
        lease.end(changed=False)
        return self.master

    def set_master(self, values: Mapping[str, Tensor]) -> None:
        """Store fp32 values in the master weights, of which the parameters have the rounded ones.

        Args:
            values: by the parameters' names, flat, all of this segment's elements of each.
        """
        assert self.master is not None
        whole = torch.zeros(self.layout.padded, dtype=torch.float32, device=self.full.device)
        for span in self.layout.spans:
            if span.fqn in values:
                whole[span.offset :][: span.num_elements] = values[span.fqn]
        self.master.set(self.part(whole, self.plan.master), values.keys())

    def part_of_rest(self, values: Tensor) -> Tensor:
        """Return the stored parameters of the elements whose master weights this rank has."""
        parts = values.view(values.numel() * self.planned.num_shards(self.plan.master) // self.layout.padded, -1)
        return parts[self.mesh.group_index(self._rank, self.plan.master.shard_axes) % len(parts)]


class Unit:
    """The parameters of one module (without those of units inside it), and their state.

    A unit is RESTING until it is gathered, WHOLE while anyone has it open, and then gives its slot of the buffer pool
    back. One that rests whole is WHOLE for ever, but while an update of it is under way.
    """

    def __init__(
        self,
        planned: PlannedUnit,
        module: nn.Module,
        holdings: Mapping[str, Holding],
        number: int,
        rank: int,
        *,
        by_kernels: bool = False,
    ) -> None:
        self.planned = planned
        self.name = planned.name
        self.module = module
        self.segments = [Segment(segment, rank, by_kernels=by_kernels) for segment in planned.segments]
        self.number = number  # among all units of a mesh, once it is under one
        self.members = [
            Member(holdings[span.fqn], span, segment) for segment in self.segments for span in segment.layout.spans
        ]
        self.rests_whole = planned.rests_whole
        self.stays_whole = planned.stays_whole
        self.state = UnitState.WHOLE
        self.visits = 0  # open forwards and backwards
        self.holds = 0  # blocks of engine.gathered
        self.is_exact = False  # whole as it rests, also where it is computed with as decoded
        self.pinned = False
        self.has_second = False
        self.second_kept = Event()
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
    def in_use(self) -> bool:
        """True if the unit must stay unsharded."""
        return self.visits > 0 or self.holds > 0 or self.pinned

    @property
    def title(self) -> str:
        """The unit's name in messages."""
        return self.name or f"{type(self.module).__name__} (root)"

    def put_to_rest(self) -> None:
        """To RESTING: the parameters have no data from here on."""
        for member in self.members:
            resting.rest(member.param, member.resting_kind)
        self.state = UnitState.RESTING

    def begin_gather(self, gathered: Event) -> None:
        """RESTING to GATHERING: the data is there when ``gathered`` has passed."""
        assert self.state is UnitState.RESTING
        self.gathered = gathered
        self.state = UnitState.GATHERING

    def end_gather(self) -> None:
        """GATHERING to WHOLE: the parameters have their data."""
        assert self.state is UnitState.GATHERING
        for member in self.members:
            resting.wake(member.param, member.here_kind)
        self.state = UnitState.WHOLE

    def lay(self, storage: torch.UntypedStorage) -> None:
        """Lay ``full`` of every segment, one after the other, into a storage that has memory for now."""
        self._lay(storage, [segment.dtype for segment in self.segments])

    def lay_first(self, device: torch.device) -> None:
        """Lay ``full`` of every segment in the dtype of its first values, into memory of its own."""
        dtypes = [segment.first_dtype for segment in self.segments]
        num_bytes = sum(s.layout.padded * dtype.itemsize for s, dtype in zip(self.segments, dtypes, strict=True))
        self._lay(allocate(num_bytes, torch.uint8, device).untyped_storage(), dtypes)

    def _lay(self, storage: torch.UntypedStorage, dtypes: Sequence[torch.dtype]) -> None:
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


def replace_data(param: nn.Parameter, values: Tensor) -> None:
    """Give a parameter other values, also of another device, dtype or shape, while it stays the same object."""
    try:
        param.data = values
    except RuntimeError:  # another device: only torch's own swap keeps the object
        # Made from the values themselves, it would share the version of the whole buffer, which every gather raises.
        fresh = nn.Parameter(values.new_empty(0), requires_grad=param.requires_grad)
        fresh.data = values
        kind = type(param)
        param.__class__ = nn.Parameter
        torch.utils.swap_tensors(param, fresh)
        param.__class__ = kind
