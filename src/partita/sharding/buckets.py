"""Where gradients are collected and reduced: buckets of constant order, of one large or several small segments.

Names: a bucket's ``whole`` is ``[group size, columns]``, a row for each rank that will own its sum; ``shard`` is this
rank's row of the reduced gradient, ``[columns]``, kept in the table's tier. Where the table keeps gradients whole on
the device between micro-batches, ``whole`` rests and ``shard`` is a row of it; elsewhere ``whole`` is a slot borrowed
from a ring while one backward fills and sends it, and where gradients rest nowhere ``shard`` is one, too. Where no step
leads from autograd's gradient to the optimizer's, there is neither: the gradient stays where autograd put it.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from partita.memory.ring import Slot
from partita.memory.streams import Event
from partita.memory.tiers import InMemory, Kept, StateMemory
from partita.plan.mesh_shape import MeshShape
from partita.plan.planned import share_buckets
from partita.plan.residence import Tier
from partita.plan.steps import AllReduce, ReduceScatter, steps
from partita.sharding.dtypes import dtype_of
from partita.sharding.unit import Member, Segment


@dataclass(frozen=True)
class Piece:
    """Elements ``[start, stop)`` of a parameter's gradient at column ``column`` of row ``row`` of a bucket."""

    row: int
    column: int
    start: int
    stop: int


class BucketState(Enum):
    OPEN = "open"  # takes gradients
    REDUCED = "reduced"  # launched: the shard holds the sum once ``reduced_at`` has passed


class Bucket:
    """Segments whose gradients are reduced together.

    ``arrived``: members whose gradients lie in ``whole``; ``fresh``: those that brought one in this wave; ``expected``:
    those it waits for, learned from the last two waves; ``used``: those that brought one since the last update.
    """

    def __init__(self, index: int, segments: Sequence[Segment], members: Sequence[Member], mesh: MeshShape) -> None:
        self.index, self.segments, self.members, self.mesh = index, segments, members, mesh
        self.plan = segments[0].plan
        self.dtype = dtype_of(self.plan.grad_step.encoding)
        self.num_rows = segments[0].layout.num_parts
        self.first_column = dict[int, int]()
        self.columns = 0
        for segment in segments:
            self.first_column[id(segment)] = self.columns
            self.columns += segment.layout.part_elements
        self.pieces = {id(member): self._pieces(member) for member in members}
        self.gaps = self._gaps()
        self.rests = self.plan.gradients_rest
        self.in_place = self.rests and not steps(self.plan.grad_arrival, self.plan.grad_step, mesh)
        between = self.plan.grad_between
        is_whole = mesh.group_size(between.shard_axes) == 1 and between.tier is Tier.DEVICE
        self.rests_whole = self.rests and not self.in_place and is_whole
        self.reduces = [
            op
            for op in steps(self.plan.grad_arrival, self.plan.grad_step, mesh)
            if isinstance(op, AllReduce | ReduceScatter)
        ]
        self.axes = self.reduces[0].axes if self.reduces else ()  # of the group that it is reduced over
        self.travels = bool(self.reduces) or not (self.in_place or self.rests_whole)
        self.state = BucketState.OPEN
        self.whole: Tensor | None = None
        self.shard: Kept | None = None
        self.squares: list[Tensor] = []  # of a shard on disk: the sums of squares of its segments
        self.carry: Tensor | None = None
        self.filled = False
        self.reduced_at = Event()
        self.slot: Slot | None = None  # whose memory ``whole`` is, where it is borrowed
        self.arrived: set[int] = set()
        self.fresh: set[int] = set()
        self.previously: set[int] = set()
        self.expected = {id(member) for member in members}
        self.used: set[int] = set()

    def _pieces(self, member: Member) -> tuple[Piece, ...]:
        layout, first = member.segment.layout, self.first_column[id(member.segment)]
        found = []
        for row in range(layout.num_parts):
            begin = row * layout.part_elements
            span = member.span.within(begin, begin + layout.part_elements)
            if span is not None:
                found.append(Piece(row, first + span.offset, span.start, span.stop))
        return tuple(found)

    @property
    def num_elements(self) -> int:
        return self.num_rows * self.columns

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def complete(self) -> bool:
        return self.expected <= self.fresh

    def allocate(self, row: int, memory: StateMemory) -> None:
        """Have memory for the gradients that rest here. ``row`` is this rank's."""
        if self.in_place or self.shard is not None or not self.rests:
            return
        tier = self.plan.grad_between.tier
        if self.rests_whole:
            self.whole = (
                memory.keep("gradients", self.num_elements, self.dtype, tier).lend().tensor.view(self.num_rows, -1)
            )
            self.shard = InMemory(self.whole[row], tier)
        else:
            self.shard = memory.keep("gradients", self.columns, self.dtype, tier)

    def absorb(self, member: Member, divisor: int) -> None:
        """Move a parameter's gradient, divided, into ``whole``: copied if it is its first, else added."""
        grad = member.grad
        if grad is None:
            return
        assert self.whole is not None
        flat, first = member.flat(grad.detach()), id(member) not in self.arrived
        for piece in self.pieces[id(member)]:
            target = self.whole[piece.row, piece.column : piece.column + piece.stop - piece.start]
            source = flat[piece.start : piece.stop]
            if not first:
                target.add_(source, alpha=1.0 / divisor)
            elif divisor == 1:
                target.copy_(source)
            elif target.dtype == source.dtype:
                torch.mul(source, 1.0 / divisor, out=target)
            else:
                target.copy_(source).mul_(1.0 / divisor)
        self.arrived.add(id(member))
        self.used.add(id(member))
        member.param.grad = None

    @property
    def reduced(self) -> Kept | None:
        """This rank's row of the sums over the ranks so far, ``[columns]``; what was collected since is not in it."""
        if not self.rests:
            return None
        if self.carry is not None:
            return InMemory(self.carry, Tier.DEVICE)
        return self.shard if self.state is BucketState.REDUCED or (self.filled and not self.rests_whole) else None

    @property
    def shard_bytes(self) -> int:
        """Of what the reduction leaves on this rank."""
        return self.columns * self.dtype.itemsize

    def clear(self, member: Member) -> None:
        """Zeros in place of a gradient that did not come."""
        assert self.whole is not None
        for piece in self.pieces[id(member)]:
            self.whole[piece.row, piece.column : piece.column + piece.stop - piece.start].zero_()

    def clear_gaps(self) -> None:
        """Zeros in the padding, so that it adds nothing to norms."""
        assert self.whole is not None
        for row, begin, end in self.gaps:
            self.whole[row, begin:end].zero_()

    def _gaps(self) -> list[tuple[int, int, int]]:
        covered: list[list[tuple[int, int]]] = [[] for _ in range(self.num_rows)]
        for pieces in self.pieces.values():
            for piece in pieces:
                covered[piece.row].append((piece.column, piece.column + piece.stop - piece.start))
        found = []
        for row, ranges in enumerate(covered):
            at = 0
            for begin, end in [*sorted(ranges), (self.columns, self.columns)]:
                if begin > at:
                    found.append((row, at, begin))
                at = max(at, end)
        return found

    def parts(self, shard: Tensor, used: AbstractSet[int]) -> list[Tensor]:
        """The shard's values as the norm adds them up: segment by segment, or, where a rank owns all, parameter by
        parameter (as those that autograd left in place), of those that are ``used``.
        """
        if self.num_rows > 1:
            return list(shard.split([segment.layout.part_elements for segment in self.segments]))
        owned = (self.owned_of(member, 0, shard) for member in self.members if id(member) in used)
        return [part for part in owned if part is not None]

    def owned_of(self, member: Member, row: int, shard: Tensor | None) -> Tensor | None:
        """This rank's piece of a member's reduced gradient; None where it owns nothing of it.

        ``shard``: the values of :attr:`shard`, where there is one.
        """
        if shard is None:
            return member.param.grad
        for piece in self.pieces[id(member)]:
            if piece.row == row:
                return shard[piece.column : piece.column + piece.stop - piece.start]
        return None

    def grad_of(self, member: Member, row: int, shard: Tensor | None) -> Tensor | None:
        """The gradient the optimizer sees: this rank's piece, or all of it where gradients end up whole."""
        if shard is None or self.mesh.group_size(self.plan.grad_step.shard_axes) > 1:
            return self.owned_of(member, row, shard)
        whole, offset = shard if self.whole is None else self.whole.view(-1), member.span.offset
        return member.shaped(whole[offset : offset + member.span.num_elements])


def square(grad: Tensor) -> Tensor:
    """The sum of squares, in float64."""
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
    return norm.double().square()


def make_buckets(segments: Sequence[tuple[Segment, Sequence[Member]]], mesh: MeshShape) -> list[Bucket]:
    """The buckets of the given segments and their members, in the order in which they will be reduced."""
    buckets = []
    for index, positions in enumerate(share_buckets([segment.planned for segment, _ in segments], mesh)):
        group = [segments[position] for position in positions]
        members = [member for _, members in group for member in members]
        buckets.append(Bucket(index, [segment for segment, _ in group], members, mesh))
    return buckets
