"""Gradient buffers: the memory in which the gradients of one bucket are collected, and that of their sum.

``full`` is ``[num_rows, num_columns]``, with one row per rank that keeps a shard of the sum. ``shard`` is this rank's
row of the sum, ``[num_columns]``, in the tier of the table. :class:`BucketLayout` has the fixed position of each
element.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.layout.dtypes import dtype_of
from partita.memory.allocate import over
from partita.memory.buffer_pool import Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import InMemory, StateMemory, StoredState
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment
from partita.table.planned_bucket import PlannedBucket


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a parameter's gradient at column ``column`` of row ``row`` of a bucket."""

    row: int
    column: int
    start: int
    stop: int

    def of(self, row: Tensor) -> Tensor:
        """Return the elements of the piece in its row ``[num_columns]``, as a view."""
        return row[self.column : self.column + self.stop - self.start]


class BucketLayout:
    """The layout ``[num_rows, num_columns]`` of a bucket: one row per rank that keeps a shard of the sum, with that
    rank's shard of each segment.

    Attributes:
        planned: the bucket in the plan.
        row: this rank's row.
        pieces: the pieces of each member, by its id.
        gaps: (row, first column, end) of the padding.
        is_saved: True if this rank saves the row, among the ranks that have the same row.
        is_measured: True if this rank adds the row to the norm, among the ranks of its replica that have the same row.
    """

    def __init__(self, segments: Sequence[Segment], members: Sequence[Member]) -> None:
        self.segments = segments
        self.members = members
        self.planned = PlannedBucket(tuple(segment.planned for segment in segments))
        first = segments[0]  # all segments of a bucket are sharded over the same axes
        self.row = first.shard_index
        self.is_saved = first.is_first_copy
        self.is_measured = first.is_first_of_replica
        self.num_rows = self.planned.num_shards
        self.num_columns = 0
        first_column = dict[int, int]()
        for segment in segments:
            first_column[id(segment)] = self.num_columns
            self.num_columns += segment.layout.shard_elements
        self.num_elements = self.num_rows * self.num_columns
        self.pieces = {id(member): _pieces(member, first_column[id(member.segment)]) for member in members}
        self.gaps = self._gaps()

    def pieces_of_unused(self, used: AbstractSet[int]) -> list[tuple[Piece, ...]]:
        """Return the pieces of each member that is not ``used`` (by id)."""
        return [pieces for member, pieces in self.pieces.items() if member not in used]

    def clear_gaps(self, values: Tensor, only: int | None = None) -> None:
        """Zero the padding of ``values`` ``[num_rows, num_columns]``, so that it adds nothing to norms.

        Args:
            only: ``values`` is this row.
        """
        for row, begin, end in self.gaps:
            if only in (None, row):
                (values[row] if only is None else values)[begin:end].zero_()

    def _gaps(self) -> list[tuple[int, int, int]]:
        occupied: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for pieces in self.pieces.values():
            for piece in pieces:
                occupied[piece.row].append((piece.column, piece.column + piece.stop - piece.start))
        found = []
        for row, ranges in enumerate(occupied):
            at = 0
            for begin, end in [*sorted(ranges), (self.num_columns, self.num_columns)]:
                if begin > at:
                    found.append((row, at, begin))
                at = max(at, end)
        return found


def _pieces(member: Member, first_column: int) -> tuple[Piece, ...]:
    layout = member.segment.layout
    begins = [row * layout.shard_elements for row in range(layout.num_shards)]
    spans = [member.span.within(begin, begin + layout.shard_elements) for begin in begins]
    return tuple(Piece(row, first_column + s.offset, s.start, s.stop) for row, s in enumerate(spans) if s is not None)


class GradientBuffer:
    """The gradient buffer of one bucket; subclasses differ in its memory.

    Attributes:
        full: all gradients of the bucket, if they are collected.
        shard: this rank's row of the sum, if it has memory.
        previous_sum: this rank's row of earlier sums, while ``full`` collects more gradients in the same memory.
    """

    collects = True  # True if gradients are moved out of ``.grad``
    keeps_full = False  # True if unsharded gradients are kept until the last micro-batch
    full: Tensor | None = None
    shard: StoredState | None = None
    previous_sum: Tensor | None = None

    def __init__(self, layout: BucketLayout, ledger: Ledger) -> None:
        self._layout = layout
        self._ledger = ledger
        self._row = layout.planned.row
        self._dtype = dtype_of(self._row.grad_step.encoding)

    def allocate(self, memory: StateMemory) -> None:
        """Allocate the memory that lasts between steps, once."""

    def note(self, member: Member) -> None:
        """Record a member's gradient, which is in its ``.grad``."""

    def reopen(self, reduced: Event) -> None:
        """Allow more gradients, though ``shard`` has a sum once ``reduced`` has passed."""

    def release(self) -> Slot | None:
        """Release the collected gradients. Returns the slot that is free now."""
        return None

    def clear(self) -> None:
        """Drop all gradients."""

    def total(self) -> Tensor:
        """Return the sum of all collected values, which is not finite if any of them is not."""
        assert self.full is not None
        return self.full.sum(dtype=torch.float32)


class InPlaceBuffer(GradientBuffer):
    """No buffer: the optimizer uses the gradients in ``.grad``, without reduction."""

    collects = False

    def __init__(self, layout: BucketLayout, ledger: Ledger) -> None:
        super().__init__(layout, ledger)
        self._num_bytes = 0
        self._versions = dict[int, int]()  # of the gradients as backward left them

    def note(self, member: Member) -> None:
        if (grad := member.grad) is not None:
            if id(member) not in self._versions:
                self._num_bytes += grad.nbytes
                self._ledger.add("gradients", grad.nbytes)
            self._versions[id(member)] = grad._version

    def divide(self, members: Iterable[Member], divisor: int) -> None:
        """Turn sums over micro-batches into means.

        Raises:
            PartitaError: a gradient was changed since backward.
        """
        for member in members:
            grad = member.param.grad
            assert grad is not None
            if self._versions.get(id(member), grad._version) != grad._version:
                raise PartitaError(
                    f"the .grad of '{member.fqn}' was changed between backward and step (by "
                    "torch.nn.utils.clip_grad_norm_?): on several ranks, or in other precisions, this would have no "
                    "effect. Set clip_grad_norm in the config, or call engine.clip_grad_norm(max_norm) before "
                    "engine.step()"
                )
            if divisor != 1:
                grad.mul_(1.0 / divisor)

    def clear(self) -> None:
        self._ledger.remove("gradients", self._num_bytes)
        self._num_bytes = 0
        self._versions.clear()


class ResidentBuffer(GradientBuffer):
    """A full buffer that stays on the device between micro-batches; this rank's row of it also gets the sum."""

    keeps_full = True

    def allocate(self, memory: StateMemory) -> None:
        if self.shard is None:
            tier = self._row.grad_between.tier
            kept = memory.keep("gradients", self._layout.num_elements, self._dtype, tier)
            self.full = kept.lease().tensor.view(self._layout.num_rows, -1)
            self.shard = InMemory(self.full[self._layout.row], tier)

    def reopen(self, reduced: Event) -> None:
        assert self.shard is not None
        reduced.wait()
        self.previous_sum = self.shard.load()
        self._ledger.add("gradients", self.previous_sum.nbytes)

    def release(self) -> Slot | None:
        if self.previous_sum is not None:
            self._ledger.remove("gradients", self.previous_sum.nbytes)
            self.previous_sum = None
        return None


class PooledBuffer(GradientBuffer):
    """A slot of a buffer pool, borrowed until the gradients of one backward are reduced. The sum has its own memory if
    reduced gradients are stored, else another slot.
    """

    _slot: Slot | None = None
    _memory: StateMemory | None = None

    def allocate(self, memory: StateMemory) -> None:
        self._memory = memory
        if self.shard is None and self._row.stores_gradients:
            tier = self._row.grad_between.tier
            self.shard = memory.keep("gradients", self._layout.num_columns, self._dtype, tier)

    def borrow(self, slot: Slot) -> None:
        """Collect gradients in a slot until :meth:`release`."""
        slot.last_use.wait()
        self._slot = slot
        self.full = over(slot.storage, self._dtype, self._layout.num_elements).view(self._layout.num_rows, -1)
        self._layout.clear_gaps(self.full)

    def borrow_for_sum(self, slot: Slot) -> None:
        """Write the sum into this slot."""
        assert self._memory is not None
        values = over(slot.storage, self._dtype, self._layout.num_columns)
        self.shard = self._memory.over(values, self._row.grad_step.tier)

    def release(self) -> Slot | None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self.full = None
        return slot


def make_buffer(layout: BucketLayout, ledger: Ledger) -> GradientBuffer:
    """Create the buffer that the plan asks for."""
    planned = layout.planned.gradients
    kinds: dict[type[GradientBuffer], bool] = {
        InPlaceBuffer: planned.in_place,
        ResidentBuffer: planned.is_resident,
        PooledBuffer: planned.is_pooled,
    }
    (kind,) = (kind for kind, is_planned in kinds.items() if is_planned)
    return kind(layout, ledger)
