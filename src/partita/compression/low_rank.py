"""PowerSGD: sums of matrices as two thin factors, whose error is sent with the next ones (Vogels et al., 2019)."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from partita.comm.group import Group
from partita.comm.transport import write_out
from partita.compression.error_feedback import ErrorFeedbackPlan, ErrorFeedbackSync
from partita.kernels.low_rank import first_right, left_factor, orthogonal, product, right_factor
from partita.memory.tiers import StateMemory
from partita.plan.planned_bucket import PlannedBucket
from partita.plan.planned_gradients import PlannedGradients
from partita.plan.residence import FP32
from partita.plan.span import SegmentLayout
from partita.plan.strategies import Message, Operations
from partita.sharding.gradient_buffer import BucketLayout
from partita.sharding.gradient_sync import SyncCall, Unused
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member


@dataclass(frozen=True)
class Matrix:
    """A parameter as ``[rows, columns]``: what its low-rank factors are of."""

    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Matrix":
        """All dims but the first are columns."""
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        return cls(rows, columns)

    def factor_columns(self, rank: int) -> int:
        """Columns of each factor; 0 where the factors would be no fewer values than the matrix."""
        num = min(rank, self.rows, self.columns)
        return num if (self.rows + self.columns) * num < self.rows * self.columns else 0


@dataclass(frozen=True)
class FactorShapes:
    """The matrices of one segment that become low-rank factors of ``rank`` columns."""

    layout: SegmentLayout
    rank: int

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """By name, the parameters of which factors travel; others travel as they are."""
        found = {span.fqn: Matrix.of(span.place.sizes) for span in self.layout.spans}
        return {fqn: matrix for fqn, matrix in found.items() if matrix.factor_columns(self.rank)}

    @property
    def num_elements(self) -> tuple[int, int]:
        """Values in the two messages of a sum: left factors with what travels as it is, and right ones."""
        left, right = sum(span.num_elements for span in self.layout.spans), 0
        for matrix in self.matrices.values():
            num = matrix.factor_columns(self.rank)
            left += matrix.rows * num - matrix.rows * matrix.columns
            right += matrix.columns * num
        return left, right


class Factors:
    """The low-rank factors of one bucket. The right ones start the next step; they change when a step updates.

    Args:
        rank: columns of left factors, rows of right ones.
    """

    def __init__(self, layout: BucketLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        shapes = [FactorShapes(segment.layout, rank) for segment in layout.segments]
        matrices = {fqn: matrix for each in shapes for fqn, matrix in each.matrices.items()}
        self._matrices: list[tuple[Member, Matrix]] = [
            (m, matrices[m.fqn]) for m in layout.members if m.fqn in matrices
        ]
        self._others = [member for member in layout.members if member.fqn not in matrices]
        self._rights = list[Tensor]()
        self._next = list[Tensor]()
        self._starts = dict[int, Tensor]()  # by member: drawn once
        self._has_copies = bool(layout.planned.gradients.copy_steps)
        self._num_sums = 0

    @property
    def are_whole(self) -> bool:
        """True if this step's gradients are one sum of factors, which every rank has decoded."""
        return self._num_sums == 1 and not self._has_copies

    def reduce(self, whole: Tensor, held: Tensor, group: Group) -> None:
        """Overwrite every rank's ``whole`` ``[num_rows, num_columns]`` by the sum over the group, as it is decoded; and
        what is ``held`` back of it (fp32), which is sent with it, by what the sum lacks of this rank's.
        """
        self._num_sums += 1
        fed = held.add_(whole)
        starts = self._next or self._rights or [self._start(*of) for of in self._matrices]
        matrices = [self._of(member, fed).view(matrix.rows, -1) for member, matrix in self._matrices]
        lefts = [left_factor(*pair) for pair in zip(matrices, starts, strict=True)]
        summed = self._sum([*lefts, *(self._of(member, fed) for member in self._others)], group)
        lefts = _orthogonal(summed[: len(lefts)])
        rights = self._sum([right_factor(*pair) for pair in zip(matrices, lefts, strict=True)], group)
        for (member, _), *factors in zip(self._matrices, lefts, rights, strict=True):
            self._decode(member, factors, whole, fed, share=1.0 / group.size)
        for member, values in zip(self._others, summed[len(lefts) :], strict=True):
            for piece in self._layout.pieces[id(member)]:
                piece.of(whole[piece.row]).copy_(values[piece.start : piece.stop])
                piece.of(fed[piece.row]).zero_()
        self._next = [self._alive(*of, right) for of, right in zip(self._matrices, rights, strict=True)]

    def commit(self) -> None:
        """The step ends in an update."""
        self._rights = self._next or self._rights
        self._next = []
        self._num_sums = 0

    def forget(self) -> None:
        """The step ends without an update."""
        self._next = []
        self._num_sums = 0

    def clear(self) -> None:
        """Forget all factors, as at the start."""
        self._rights = []
        self._next = []
        self._num_sums = 0

    def _start(self, member: Member, matrix: Matrix) -> Tensor:
        if id(member) not in self._starts:
            num, seed = matrix.factor_columns(self._rank), zlib.crc32(member.fqn.encode())
            self._starts[id(member)] = first_right(matrix.columns, num, seed, member.segment.full.device)
        return self._starts[id(member)]

    def _alive(self, member: Member, matrix: Matrix, right: Tensor) -> Tensor:
        """A row of zeros, as of a gradient that did not come, would be one for ever: it starts anew."""
        return torch.where(right.any(1, keepdim=True), right, self._start(member, matrix))

    def _of(self, member: Member, whole: Tensor) -> Tensor:
        """A member's values in its stride order: a view, where they lie in one piece."""
        pieces = sorted(self._layout.pieces[id(member)], key=lambda piece: piece.start)
        parts = [piece.of(whole[piece.row]) for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, member: Member, factors: Sequence[Tensor], whole: Tensor, held: Tensor, *, share: float) -> None:
        """A matrix in its place; of what was sent, this rank holds back all but its ``share`` of that."""
        left, right = factors
        pieces = self._layout.pieces[id(member)]
        is_written = len(pieces) == 1 and whole.dtype == left.dtype
        out = self._of(member, whole).view(len(left), -1) if is_written else None
        values = product(left, right, out).view(-1)
        for piece in pieces:
            part = values[piece.start : piece.stop]
            if not is_written:
                piece.of(whole[piece.row]).copy_(part)
            piece.of(held[piece.row]).sub_(part, alpha=share)

    def _sum(self, tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
        """The sums over the group of several tensors, in one message."""
        if not tensors:
            return []
        total = group.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]), "gradients", "gradients")
        parts = total.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _orthogonal(lefts: Sequence[Tensor]) -> list[Tensor]:
    """See :func:`~partita.kernels.low_rank.orthogonal`: those of the same shape at once."""
    alike = dict[torch.Size, list[int]]()
    for number, left in enumerate(lefts):
        alike.setdefault(left.shape, []).append(number)
    found = dict[int, Tensor]()
    for numbers in alike.values():
        found.update(zip(numbers, orthogonal(torch.stack([lefts[number] for number in numbers])), strict=True))
    return [found[number] for number in range(len(lefts))]


@dataclass(frozen=True)
class LowRankPlan(ErrorFeedbackPlan):
    """Sums low-rank factors: two all-reduces a bucket, in place of the table's operations.

    Attributes:
        rank: columns of the left factors.
        exact_gathers: the table's gathers, for gradients that are not one sum of factors.
    """

    rank: int
    exact_gathers: Operations

    def make(self, layout: BucketLayout, memory: StateMemory) -> "LowRankSync":
        return LowRankSync(layout, self, memory)

    def error_sizes(self, gradients: PlannedGradients) -> tuple[int, ...]:
        return (gradients.layout.padded,)

    def messages(self, bucket: PlannedBucket) -> Iterator[Message]:
        axes = bucket.mesh.named(bucket.row.summed_axes)
        num = bucket.mesh.group_size(axes)
        sizes = [FactorShapes(segment.layout, self.rank).num_elements for segment in bucket.segments]
        for num_elements in map(sum, zip(*sizes, strict=True)):
            if num_bytes := FP32.num_bytes(num_elements):
                yield Message("all_reduce", axes, 2 * (num - 1) * num_bytes // num)


class LowRankSync(ErrorFeedbackSync):
    """Every rank decodes the whole sum, so a gather has nothing to send. The factors start anew after a checkpoint."""

    def __init__(self, layout: BucketLayout, plan: LowRankPlan, memory: StateMemory) -> None:
        super().__init__(layout, plan, memory)
        self.factors = Factors(layout, plan.rank)
        self._summed_axes = layout.planned.row.summed_axes
        self._exact_gathers = plan.exact_gathers

    @property
    def gathers(self) -> bool:
        return bool(self._exact_gathers)

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        rows = full.view(self.layout.num_rows, -1)
        with self._levels_lent(scale, call.interpreter.device) as levels:
            self.factors.reduce(rows, levels[0].view_as(rows), call.interpreter.group(self._summed_axes))
            write_out(rows[self.row], out, accumulate=add)

    def gather(self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, unused: Unused) -> None:
        assert full is not None
        if not self.factors.are_whole:
            call.interpreter.run(self._exact_gathers, shard, full.view(-1), purpose="gradients")
            return
        for number, row in enumerate(full.view(self.layout.num_rows, -1)):
            if number != self.row:
                row.mul_(factor)

    def commit(self, unused: Unused) -> None:
        if self._is_open:
            super().commit(unused)
            self.factors.commit()

    def discard(self) -> None:
        super().discard()
        self.factors.forget()

    def settle(self, interpreter: Interpreter) -> None:
        self.factors.clear()
        super().settle(interpreter)

    def clear(self) -> None:
        super().clear()
        self.factors.clear()
