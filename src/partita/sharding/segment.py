"""A segment: one flat buffer of a unit, what is stored of it between steps, and its master weights.

Names used everywhere: ``full`` is the flat buffer of all parameters of the segment in the compute encoding, which the
user's ``nn.Parameter`` objects are permanent views of; ``rest`` is what stays of it between steps (``full`` itself, or
this rank's part); ``second`` is the part kept beside it between forward and backward (hierarchical); ``master`` holds
the values that the optimizer updates, and is ``rest``, or a part of it, wherever their encodings are the same.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from partita.kernels.chunks import chunks
from partita.kernels.quantize import join, nearest_bf16, split
from partita.memory.tiers import InMemory, Kept, Lease, StateMemory
from partita.plan.planned import PlannedSegment
from partita.plan.residence import SPLIT, Residence
from partita.plan.span import Span
from partita.planner.dtypes import dtype_of


class MasterWeights:
    """This rank's part of a segment's master weights.

    They are the parameters at rest (or this rank's part of them), or a state of their own. A split state has the low
    halves of fp32 values whose high halves are the bf16 parameters at rest.

    Args:
        state: where they are kept.
        residence: the row's.
        spans: of the parameters, with offsets in ``state``.
    """

    def __init__(self, state: Kept, residence: Residence, spans: Sequence[Span]) -> None:
        self.state = state
        self.splits = residence.encoding == SPLIT
        self._spans = spans

    @classmethod
    def apart(cls, values: Tensor, residence: Residence, spans: Sequence[Span], memory: StateMemory) -> "MasterWeights":
        """A state of their own, with the ``values`` of this rank's part, in fp32 or as the parameters are."""
        state = memory.keep("master", values.numel(), dtype_of(residence.encoding), residence.tier)
        if residence.encoding == SPLIT:
            values = split(values)[1] if values.dtype == torch.float32 else torch.zeros_like(values)
        state.store(values)
        return cls(state, residence, spans)

    def lend(self) -> Lease:
        """The weights in memory."""
        return self.state.lend()

    def joined(self, parameters: Tensor, held: Tensor) -> Tensor:
        """The weights that ``held`` has, or, with the same elements of the ``parameters``, has the low halves of."""
        return join(parameters.to(held.device), held) if self.splits else held

    def set(self, values: Tensor, names: AbstractSet[str], before: Tensor | None = None) -> None:
        """Overwrite the weights of the named parameters.

        Args:
            values: this rank's part of all parameters: in the dtype in compute, or, to be stored as they are, in fp32.
            before: the parameters without what was written, where they are known: where they are equal to ``values``,
                low halves stay.
        """
        lease = self.lend()
        master = lease.wait()
        values = values.to(master.device)
        for span in self._spans:
            if span.fqn in names:
                place = slice(span.offset, span.offset + span.num_elements)
                if self.splits and values.dtype == torch.float32:
                    master[place] = split(values[place])[1]
                elif self.splits:
                    same = None if before is None else before[place].to(values.device) == values[place]
                    master[place] = 0 if same is None else master[place].where(same, torch.zeros_like(master[place]))
                else:  # where a value is the master's own, rounded, the master keeps its digits
                    own = master[place].to(values.dtype) == values[place]
                    master[place] = torch.where(own, master[place], values[place].to(master))
        lease.end(changed=True)


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
        self.secondary: Kept | None = None
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
    def stored_spans(self) -> tuple[Span, ...]:
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
        return num_shards == self.layout.num_parts and not self.planned.has_secondary

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

    def keep_stored(self, memory: StateMemory, first: Tensor | None = None, *, is_part: bool = False) -> None:
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
        elif self.planned.always_unsharded:
            self.rest = memory.adopt("parameters", self.full)
        else:
            self.rest = self._keep_part(row.param_rest, memory)
        if self.planned.has_secondary:
            self.secondary = self._keep_part(row.param_between, memory)
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
        values = self.part_of_stored(lease.wait())
        if self.master_is_parameter:
            self.master = MasterWeights(InMemory(values, self.rest.tier), residence, self.master_spans)
        else:
            exact = values if first is None else self.part_of_stored(first)
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

    def part_of_stored(self, values: Tensor) -> Tensor:
        """Return the stored parameters of the elements whose master weights this rank has."""
        parts = values.view(values.numel() * self.planned.num_shards(self.plan.master) // self.layout.padded, -1)
        return parts[self.mesh.group_index(self._rank, self.plan.master.shard_axes) % len(parts)]
