"""Gradient buffers: the memory in which the gradients of one bucket are collected, and that of their sum.

``full`` is ``[num_rows, num_columns]``, a row for each rank that will own its sum; ``shard`` is this rank's row of
the sum, ``[num_columns]``, in the table's tier. :class:`BucketLayout` has the place of each element, which never
changes.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.memory.allocate import over
from partita.memory.buffer_pool import Slot
from partita.memory.ledger import Ledger
from partita.memory.streams import Event
from partita.memory.tiers import InMemory, Kept, StateMemory
from partita.plan.planned_bucket import PlannedBucket
from partita.planner.dtypes import dtype_of
from partita.sharding.parameter import Member
from partita.sharding.segment import Segment


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a parameter's gradient at column ``column`` of row ``row`` of a bucket."""

    row: int
    column: int
    start: int
    stop: int

    def of(self, row: Tensor) -> Tensor:
        """The piece's elements of its row ``[num_columns]``; a view."""
        return row[self.column : self.column + self.stop - self.start]


class BucketLayout:
    """``[num_rows, num_columns]``: a row for each rank that will own its sum, with its part of each segment.

    Attributes: ``planned``: the bucket on paper; ``row``: this rank's; ``pieces`` of each member, by its id; ``gaps``:
    (row, first column, end) of what is padding; ``is_saved`` and ``is_measured``: of the ranks that have the same row,
    this one saves it, and counts it in the norm.
    """

    def __init__(self, segments: Sequence[Segment], members: Sequence[Member]) -> None:
        self.segments = segments
        self.members = members
        self.planned = PlannedBucket(tuple(segment.planned for segment in segments))
        first = segments[0]  # segments of a bucket are cut alike
        self.row = first.part_index
        self.is_saved = first.is_first_copy
        self.is_measured = first.is_first_of_replica
        self.num_rows = self.planned.num_parts
        self.num_columns = 0
        first_column = dict[int, int]()
        for segment in segments:
            first_column[id(segment)] = self.num_columns
            self.num_columns += segment.layout.part_elements
        self.num_elements = self.num_rows * self.num_columns
        self.pieces = {id(member): _pieces(member, first_column[id(member.segment)]) for member in members}
        self.gaps = self._gaps()

    def pieces_of_unused(self, used: AbstractSet[int]) -> list[tuple[Piece, ...]]:
        """Return the pieces of each member that is not ``used`` (by id)."""
        return [pieces for member, pieces in self.pieces.items() if member not in used]

    def clear_gaps(self, whole: Tensor, only: int | None = None) -> None:
        """Padding of ``[num_rows, num_columns]`` becomes zeros, which add nothing to norms. ``only``: ``whole`` is that
        row.
        """
        for row, begin, end in self.gaps:
            if only in (None, row):
                (whole[row] if only is None else whole)[begin:end].zero_()

    def _gaps(self) -> list[tuple[int, int, int]]:
        covered: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for pieces in self.pieces.values():
            for piece in pieces:
                covered[piece.row].append((piece.column, piece.column + piece.stop - piece.start))
        found = []
        for row, ranges in enumerate(covered):
            at = 0
            for begin, end in [*sorted(ranges), (self.num_columns, self.num_columns)]:
                if begin > at:
                    found.append((row, at, begin))
                at = max(at, end)
        return found


def _pieces(member: Member, first_column: int) -> tuple[Piece, ...]:
    layout = member.segment.layout
    begins = [row * layout.part_elements for row in range(layout.num_parts)]
    spans = [member.span.within(begin, begin + layout.part_elements) for begin in begins]
    return tuple(Piece(row, first_column + s.offset, s.start, s.stop) for row, s in enumerate(spans) if s is not None)


class GradientBuffer:
    """The gradient buffer of one bucket; subclasses differ in its memory.

    Attributes: ``full`` and ``shard``, where there are any; ``put_aside``: this rank's row of earlier sums, while
    more is collected in their place.
    """

    collects = True  # whether gradients leave their parameters' ``.grad``
    keeps_full = False  # whether they stay whole until the last micro-batch
    full: Tensor | None = None
    shard: Kept | None = None
    put_aside: Tensor | None = None

    def __init__(self, layout: BucketLayout, ledger: Ledger) -> None:
        self._layout = layout
        self._ledger = ledger
        self._row = layout.planned.row
        self._dtype = dtype_of(self._row.grad_step.encoding)

    def allocate(self, memory: StateMemory) -> None:
        """Take the memory that stays, once."""

    def note(self, member: Member) -> None:
        """A member's gradient is in its ``.grad``."""

    def reopen(self, reduced: Event) -> None:
        """More is collected, though ``shard`` has a sum once ``reduced`` has passed."""

    def release(self) -> Slot | None:
        """Let go of what was collected. Returns the slot that is free now."""
        return None

    def clear(self) -> None:
        """All gradients are dropped."""

    def total(self) -> Tensor:
        """The sum of all that was collected: not finite where an element is not."""
        assert self.full is not None
        return self.full.sum(dtype=torch.float32)


class InPlaceBuffer(GradientBuffer):
    """None: there is one rank, and autograd leaves gradients as the optimizer takes them."""

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
        """Sums over micro-batches become means.

        Raises:
            PartitaError: a gradient was changed since backward.
        """
        for member in members:
            grad = member.param.grad
            assert grad is not None
            if self._versions.get(id(member), grad._version) != grad._version:
                raise PartitaError(
                    f"the .grad of '{member.fqn}' was changed between backward and step (by "
                    "torch.nn.utils.clip_grad_norm_?): on several ranks, and in other precisions, there is none to "
                    "change. Set clip_grad_norm in the config, or call engine.clip_grad_norm(max_norm) before "
                    "engine.step()"
                )
            if divisor != 1:
                grad.mul_(1.0 / divisor)

    def clear(self) -> None:
        self._ledger.remove("gradients", self._num_bytes)
        self._num_bytes = 0
        self._versions.clear()


class ResidentBuffer(GradientBuffer):
    """All of it stays on the device between micro-batches; the sum is in this rank's row of it."""

    keeps_full = True

    def allocate(self, memory: StateMemory) -> None:
        if self.shard is None:
            tier = self._row.grad_between.tier
            room = memory.keep("gradients", self._layout.num_elements, self._dtype, tier)
            self.full = room.lend().tensor.view(self._layout.num_rows, -1)
            self.shard = InMemory(self.full[self._layout.row], tier)

    def reopen(self, reduced: Event) -> None:
        assert self.shard is not None
        reduced.wait()
        self.put_aside = self.shard.load()
        self._ledger.add("gradients", self.put_aside.nbytes)

    def release(self) -> Slot | None:
        if self.put_aside is not None:
            self._ledger.remove("gradients", self.put_aside.nbytes)
            self.put_aside = None
        return None


class PooledBuffer(GradientBuffer):
    """A slot of a pool while one backward fills and sends it. The sum has memory of its own, where it rests, or passes
    through a slot, too.
    """

    _slot: Slot | None = None

    def allocate(self, memory: StateMemory) -> None:
        if self.shard is None and self._row.gradients_rest:
            tier = self._row.grad_between.tier
            self.shard = memory.keep("gradients", self._layout.num_columns, self._dtype, tier)

    def borrow(self, slot: Slot) -> None:
        """Collect in a slot until :meth:`release`."""
        slot.last_use.wait()
        self._slot = slot
        self.full = over(slot.storage, self._dtype, self._layout.num_elements).view(self._layout.num_rows, -1)
        self._layout.clear_gaps(self.full)

    def borrow_for_sum(self, slot: Slot) -> None:
        """The sum passes through this slot."""
        self.shard = InMemory(over(slot.storage, self._dtype, self._layout.num_columns), self._row.grad_step.tier)

    def release(self) -> Slot | None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self.full = None
        return slot


def make_buffer(layout: BucketLayout, ledger: Ledger) -> GradientBuffer:
    """Return the buffer that the plan asks for."""
    planned = layout.planned.gradients
    kinds: dict[type[GradientBuffer], bool] = {
        InPlaceBuffer: planned.in_place,
        ResidentBuffer: planned.rest_whole,
        PooledBuffer: planned.pass_through,
    }
    (kind,) = (kind for kind, is_planned in kinds.items() if is_planned)
    return kind(layout, ledger)
