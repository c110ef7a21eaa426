"""A segment: one flat buffer of a unit, its stored parameters, and its master weights.

Names used everywhere:

- ``full``: the unsharded flat buffer in the compute encoding; the user's parameters are permanent views of it.
- ``stored``: the parameters stored between steps: ``full`` itself, or this rank's shard.
- ``secondary``: the secondary shard between forward and backward (hierarchical).
- ``master``: the values that the optimizer updates; ``stored`` or a slice of it if their encodings are equal.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from partita.kernels.chunks import chunks
from partita.kernels.quantize import join, nearest_bf16, split
from partita.layout.dtypes import dtype_of
from partita.memory.tiers import InMemory, Lease, StateMemory, StoredState
from partita.table.planned import PlannedSegment
from partita.table.residence import SPLIT, Residence
from partita.table.span import Span


class MasterWeights:
    """This rank's shard of a segment's master weights.

    They are the stored parameters (or a slice of them), or a separate state. A split state has the low halves of fp32
    values whose high halves are the stored bf16 parameters.

    Args:
        state: the stored state.
        residence: the residence of master weights in the row of the table.
        spans: the parameters' spans, with offsets in ``state``.
    """

    def __init__(self, state: StoredState, residence: Residence, spans: Sequence[Span]) -> None:
        self.state = state
        self.splits = residence.encoding == SPLIT
        self._spans = spans

    @classmethod
    def separate(
        cls, values: Tensor, residence: Residence, spans: Sequence[Span], memory: StateMemory
    ) -> "MasterWeights":
        """Create a separate state with this rank's ``values``, in fp32 or in the parameters' dtype."""
        state = memory.keep("master", values.numel(), dtype_of(residence.encoding), residence.tier)
        if residence.encoding == SPLIT:
            values = split(values)[1] if values.dtype == torch.float32 else torch.zeros_like(values)
        state.store(values)
        return cls(state, residence, spans)

    def lease(self) -> Lease:
        """Lease the weights in memory."""
        return self.state.lease()

    def joined(self, parameters: Tensor, master: Tensor) -> Tensor:
        """Return full weights: ``master`` itself, or its low halves joined with the same elements of ``parameters``."""
        return join(parameters.to(master.device), master) if self.splits else master

    def set(
        self,
        values: Tensor,
        names: AbstractSet[str],
        rounded: Callable[[Tensor], Tensor],
        before: Tensor | None = None,
    ) -> None:
        """Overwrite the weights of the named parameters.

        Args:
            values: this rank's shard of all parameters: in the compute dtype, or in fp32 to store them exactly.
            rounded: rounds weights to ``values`` as an update would. Weights that ``values`` are the rounded form of
                are kept.
            before: the parameters before they were written, if known. Elements equal to ``values`` keep their low
                halves.
        """
        lease = self.lease()
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
                else:
                    is_kept = rounded(master[place]) == values[place]
                    master[place] = torch.where(is_kept, master[place], values[place].to(master))
        lease.end(changed=True)


class Segment:
    """One flat buffer of a unit and its stored states. ``plan`` is its row of the table.

    Args:
        by_kernels: True if the optimizer writes the parameters by :mod:`partita.kernels`.
    """

    def __init__(self, planned: PlannedSegment, rank: int, *, by_kernels: bool = False) -> None:
        self.planned = planned
        self.by_kernels = by_kernels
        self.layout = planned.layout
        self.plan = planned.row
        self.mesh = planned.mesh
        self._rank = rank
        # the layout's shard that this rank keeps
        self.shard_index = planned.mesh.group_index(rank, planned.row.gradient_shard_axes)
        self.full: Tensor
        self.stored: StoredState
        self.master: MasterWeights | None = None
        self.secondary: StoredState | None = None
        self.trains = planned.trains

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.layout.encoding)

    @property
    def has_full_master(self) -> bool:
        return self.planned.num_shards(self.plan.master) == 1

    @property
    def is_first_copy(self) -> bool:
        """True if this rank saves its shard, among the ranks that have the same one."""
        return self.planned.is_first_copy(self._rank)

    @property
    def is_first_owner(self) -> bool:
        """True if this rank saves the states of the full parameters that it owns, among their owners."""
        return self.planned.is_first_owner(self._rank)

    @property
    def is_first_of_replica(self) -> bool:
        """True if this rank measures its shard, among the ranks of its replica that have the same one."""
        return self.planned.is_first_of_replica(self._rank)

    @property
    def master_spans(self) -> tuple[Span, ...]:
        """The spans of this rank's master weights, with offsets in ``master``; if unsharded, including empty ones."""
        return self._spans_of(self.plan.master)

    @property
    def stored_spans(self) -> tuple[Span, ...]:
        """The spans of this rank's stored parameters, with offsets in ``stored``; if unsharded, also empty ones."""
        return self._spans_of(self.plan.param_stored)

    def _spans_of(self, residence: Residence) -> tuple[Span, ...]:
        is_unsharded = self.planned.num_shards(residence) == 1
        return self.layout.spans if is_unsharded else self.planned.spans_of(residence, self._rank)

    def part(self, full: Tensor, residence: Residence) -> Tensor:
        """Return this rank's shard of an unsharded flat tensor (all of it if the residence is not sharded)."""
        shards = full.view(self.planned.num_shards(residence), -1)
        return shards[self.mesh.group_index(self._rank, residence.shard_axes)]

    @property
    def keeps_one_part(self) -> bool:
        """True if one of the layout's shards is all that is stored."""
        num_shards = self.planned.num_shards(self.plan.param_stored)
        return num_shards == self.layout.num_shards and not self.planned.has_secondary

    @property
    def first_dtype(self) -> torch.dtype:
        """The dtype of initial values: that of the master weights if these have a higher precision than ``full``."""
        return torch.float32 if self.layout.has_master and self.master_has_digits else self.dtype

    @property
    def master_has_digits(self) -> bool:
        """True if master weights have a higher precision than parameters in compute."""
        return self.dtype in (torch.bfloat16, torch.float16) and not self.master_is_parameter

    @property
    def keeps_digits(self) -> bool:
        """True if there are master weights, with a higher precision than parameters in compute."""
        return self.master is not None and self.master_has_digits

    def rounded(self, values: Tensor) -> Tensor:
        """Round ``values`` of :attr:`first_dtype` to the dtype of ``full``, as an update would.

        Of a value half-way between two bf16 numbers, torch takes the even one, and the kernels of this package the one
        away from zero.
        """
        if not self.by_kernels or self.dtype != torch.bfloat16 or values.dtype != torch.float32:
            return values.to(self.dtype)
        rounded = torch.empty_like(values, dtype=self.dtype)
        for at in chunks(values):
            rounded.view(-1)[at] = nearest_bf16(values.reshape(-1)[at])
        return rounded

    def keep_stored(self, memory: StateMemory, first: Tensor | None = None, *, is_part: bool = False) -> None:
        """Create the stored parameters and the master weights.

        Args:
            first: initial values in :attr:`first_dtype`: all of them, which ``full`` has, too (None: those of
                ``full``), or the shard to store.
            is_part: ``first`` is the shard to store, and ``full`` has no values.
        """
        row = self.plan
        first = self.full if first is None else first
        if is_part:
            self.stored = memory.keep_values("parameters", self.rounded(first), self.dtype, row.param_stored.tier)
        elif self.planned.always_unsharded:
            self.stored = memory.register("parameters", self.full)
        else:
            self.stored = self._store_shard(row.param_stored, memory)
        if self.planned.has_secondary:
            self.secondary = self._store_shard(row.param_between, memory)
        if self.master_is_parameter or self.layout.has_master:
            self.make_master(memory, first if first.dtype != self.dtype else None)

    def _store_shard(self, residence: Residence, memory: StateMemory) -> StoredState:
        return memory.keep_values("parameters", self.part(self.full, residence), self.dtype, residence.tier)

    @property
    def master_is_parameter(self) -> bool:
        """True if the master weights are the stored parameters, or a slice of them."""
        return self.planned.master_is_parameter

    def make_master(self, memory: StateMemory, first: Tensor | None = None) -> MasterWeights:
        """Create the master weights: in the memory of the stored parameters if the table says so, else separate.

        Args:
            first: initial values in fp32, of all parameters or of the stored shard (None: the stored values).
        """
        residence = self.plan.master
        num_elements = self.layout.padded // self.planned.num_shards(residence)
        if self.master_is_parameter and self.stored.num_elements == num_elements:
            self.master = MasterWeights(self.stored, residence, self.master_spans)
            return self.master
        lease = self.stored.lease()
        values = self.slice_for_master(lease.wait())
        if self.master_is_parameter:
            self.master = MasterWeights(InMemory(values, self.stored.tier), residence, self.master_spans)
        else:
            exact = values if first is None else self.slice_for_master(first)
            self.master = MasterWeights.separate(exact, residence, self.master_spans, memory)
        lease.end(changed=False)
        return self.master

    def clear_gaps(self, values: Tensor) -> None:
        """Zero the padding in ``values``, which have the layout of this rank's master weights.

        Block-wise formats encode the padding together with the parameters before it.
        """
        end = 0
        for span in self.master_spans:
            values[end : span.offset].zero_()
            end = span.offset + span.num_elements
        values[end:].zero_()

    def set_master_from_full(self, names: AbstractSet[str], before: Tensor | None = None) -> None:
        """Store the values that the named parameters have in ``full`` in the master weights.

        Args:
            before: see :meth:`MasterWeights.set`.
        """
        assert self.master is not None
        self.master.set(self.part(self.full, self.plan.master), names, self.rounded, before)

    def set_master(self, values: Mapping[str, Tensor]) -> None:
        """Store fp32 values in the master weights; the parameters have the rounded ones already.

        Args:
            values: flat values by parameter name, of all of the parameter's elements in this segment.
        """
        assert self.master is not None
        full = torch.zeros(self.layout.padded, dtype=torch.float32, device=self.full.device)
        for span in self.layout.spans:
            if span.fqn in values:
                full[span.offset :][: span.num_elements] = values[span.fqn]
        self.master.set(self.part(full, self.plan.master), values.keys(), lambda weights: weights)

    def slice_for_master(self, values: Tensor) -> Tensor:
        """Return the slice of this rank's stored parameters, ``values``, whose master weights this rank has."""
        slices = values.view(values.numel() * self.planned.num_shards(self.plan.master) // self.layout.padded, -1)
        return slices[self.mesh.group_index(self._rank, self.plan.master.shard_axes) % len(slices)]
