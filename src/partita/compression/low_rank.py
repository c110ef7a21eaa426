"""PowerSGD: sums of gradient matrices as two low-rank factors, with error feedback (Vogels et al., 2019)."""

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
from partita.sharding.gradient_buffer import BucketLayout
from partita.sharding.gradient_sync import SyncCall, Unused
from partita.sharding.interpreter import Interpreter
from partita.sharding.parameter import Member
from partita.table.planned_bucket import PlannedBucket
from partita.table.planned_gradients import PlannedGradients
from partita.table.residence import FP32
from partita.table.span import SegmentLayout
from partita.table.strategies import Message, Operations


@dataclass(frozen=True)
class Matrix:
    """The shape ``[rows, columns]`` of a parameter, as its low-rank factors approximate it."""

    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> "Matrix":
        """Return the matrix of a parameter. All dimensions except the first are columns."""
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        return cls(rows, columns)

    def factor_columns(self, rank: int) -> int:
        """Return the columns of each factor; 0 if the factors would have no fewer values than the matrix."""
        num = min(rank, self.rows, self.columns)
        return num if (self.rows + self.columns) * num < self.rows * self.columns else 0


@dataclass(frozen=True)
class FactorShapes:
    """The matrices of one segment that are sent as low-rank factors of ``rank`` columns."""

    layout: SegmentLayout
    rank: int

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The parameters that are sent as factors, by name. All others are sent uncompressed."""
        found = {span.fqn: Matrix.of(span.place.sizes) for span in self.layout.spans}
        return {fqn: matrix for fqn, matrix in found.items() if matrix.factor_columns(self.rank)}

    @property
    def num_elements(self) -> tuple[int, int]:
        """The sizes of a sum's two messages: left factors with uncompressed parameters, and right factors."""
        left, right = sum(span.num_elements for span in self.layout.spans), 0
        for matrix in self.matrices.values():
            num = matrix.factor_columns(self.rank)
            left += matrix.rows * num - matrix.rows * matrix.columns
            right += matrix.columns * num
        return left, right


class LowRankFactors:
    """The low-rank factors of one bucket. The right factors of an update are the start of the next step.

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
    def all_decoded(self) -> bool:
        """True if this step's gradients are one sum of factors, which every rank has decoded."""
        return self._num_sums == 1 and not self._has_copies

    def reduce(self, grads: Tensor, residual: Tensor, group: Group) -> None:
        """Replace ``grads`` by their low-rank sum over the group, and ``residual`` by this rank's error in it.

        Args:
            grads: this rank's gradients, ``[num_rows, num_columns]``.
            residual: the fp32 residual of the last step, which is added to the gradients.
        """
        self._num_sums += 1
        target = residual.add_(grads)
        starts = self._next or self._rights or [self._start(*of) for of in self._matrices]
        matrices = [self._of(member, target).view(matrix.rows, -1) for member, matrix in self._matrices]
        lefts = [left_factor(*pair) for pair in zip(matrices, starts, strict=True)]
        summed = self._sum([*lefts, *(self._of(member, target) for member in self._others)], group)
        lefts = _orthogonal(summed[: len(lefts)])
        rights = self._sum([right_factor(*pair) for pair in zip(matrices, lefts, strict=True)], group)
        for (member, _), *factors in zip(self._matrices, lefts, rights, strict=True):
            self._decode(member, factors, grads, target, share=1.0 / group.size)
        for member, values in zip(self._others, summed[len(lefts) :], strict=True):
            for piece in self._layout.pieces[id(member)]:
                piece.of(grads[piece.row]).copy_(values[piece.start : piece.stop])
                piece.of(target[piece.row]).zero_()
        self._next = [self._without_zeros(*of, right) for of, right in zip(self._matrices, rights, strict=True)]

    def commit(self) -> None:
        """Use this step's right factors as the start of the next step, after an update."""
        self._rights = self._next or self._rights
        self._next = []
        self._num_sums = 0

    def discard(self) -> None:
        """Discard this step's factors, after a skipped update."""
        self._next = []
        self._num_sums = 0

    def clear(self) -> None:
        """Discard all factors."""
        self._rights = []
        self._next = []
        self._num_sums = 0

    def _start(self, member: Member, matrix: Matrix) -> Tensor:
        if id(member) not in self._starts:
            num, seed = matrix.factor_columns(self._rank), zlib.crc32(member.fqn.encode())
            self._starts[id(member)] = first_right(matrix.columns, num, seed, member.segment.full.device)
        return self._starts[id(member)]

    def _without_zeros(self, member: Member, matrix: Matrix, right: Tensor) -> Tensor:
        """Replace rows of zeros, which a missing gradient leaves, by initial ones. They would stay zero for ever."""
        return torch.where(right.any(1, keepdim=True), right, self._start(member, matrix))

    def _of(self, member: Member, full: Tensor) -> Tensor:
        """Return a parameter's values in its stride order; a view if they are contiguous."""
        pieces = sorted(self._layout.pieces[id(member)], key=lambda piece: piece.start)
        values = [piece.of(full[piece.row]) for piece in pieces]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _decode(
        self, member: Member, factors: Sequence[Tensor], grads: Tensor, target: Tensor, *, share: float
    ) -> None:
        """Write the product of the factors to ``grads``, and subtract this rank's ``share`` of it from ``target``."""
        left, right = factors
        pieces = self._layout.pieces[id(member)]
        is_written = len(pieces) == 1 and grads.dtype == left.dtype
        out = self._of(member, grads).view(len(left), -1) if is_written else None
        values = product(left, right, out).view(-1)
        for piece in pieces:
            decoded = values[piece.start : piece.stop]
            if not is_written:
                piece.of(grads[piece.row]).copy_(decoded)
            piece.of(target[piece.row]).sub_(decoded, alpha=share)

    def _sum(self, tensors: Sequence[Tensor], group: Group) -> list[Tensor]:
        """Sum several tensors over the group in one message."""
        if not tensors:
            return []
        total = group.sum(torch.cat([tensor.reshape(-1) for tensor in tensors]), "gradients", "gradients")
        sums = total.split([tensor.numel() for tensor in tensors])
        return [each.view(tensor.shape) for each, tensor in zip(sums, tensors, strict=True)]


def _orthogonal(lefts: Sequence[Tensor]) -> list[Tensor]:
    """Apply :func:`~partita.kernels.low_rank.orthogonal` to all factors, batched by shape."""
    by_shape = dict[torch.Size, list[int]]()
    for number, left in enumerate(lefts):
        by_shape.setdefault(left.shape, []).append(number)
    found = dict[int, Tensor]()
    for numbers in by_shape.values():
        found.update(zip(numbers, orthogonal(torch.stack([lefts[number] for number in numbers])), strict=True))
    return [found[number] for number in range(len(lefts))]


@dataclass(frozen=True)
class LowRankPlan(ErrorFeedbackPlan):
    """Plan of low-rank sums: two all-reduces per bucket instead of the table's operations.

    Attributes:
        rank: columns of the left factors.
        exact_gathers: the table's uncompressed gathers, for gradients that are not one sum of factors.
    """

    rank: int
    exact_gathers: Operations

    def make(self, layout: BucketLayout, memory: StateMemory) -> "LowRankSync":
        return LowRankSync(layout, self, memory)

    def residual_sizes(self, gradients: PlannedGradients) -> tuple[int, ...]:
        return (gradients.layout.padded,)

    def messages(self, bucket: PlannedBucket) -> Iterator[Message]:
        axes = bucket.mesh.named(bucket.row.summed_axes)
        num = bucket.mesh.group_size(axes)
        sizes = [FactorShapes(segment.layout, self.rank).num_elements for segment in bucket.segments]
        for num_elements in map(sum, zip(*sizes, strict=True)):
            if num_bytes := FP32.num_bytes(num_elements):
                yield Message("all_reduce", axes, 2 * (num - 1) * num_bytes // num)


class LowRankSync(ErrorFeedbackSync):
    """Low-rank sums of one bucket. Every rank decodes the full sum, so a gather sends nothing.

    The factors are reset at each checkpoint.
    """

    def __init__(self, layout: BucketLayout, plan: LowRankPlan, memory: StateMemory) -> None:
        super().__init__(layout, plan, memory)
        self.factors = LowRankFactors(layout, plan.rank)
        self._summed_axes = layout.planned.row.summed_axes
        self._exact_gathers = plan.exact_gathers

    @property
    def gathers(self) -> bool:
        return bool(self._exact_gathers)

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        rows = full.view(self.layout.num_rows, -1)
        with self._step_residuals(scale, call.interpreter.device) as residuals:
            self.factors.reduce(rows, residuals[0].view_as(rows), call.interpreter.group(self._summed_axes))
            write_out(rows[self.row], out, accumulate=add)

    def gather(
        self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, scale: float, unused: Unused
    ) -> None:
        assert full is not None
        if not self.factors.all_decoded:
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
        self.factors.discard()

    def prepare_for_checkpoint(self, interpreter: Interpreter) -> None:
        self.factors.clear()
        super().prepare_for_checkpoint(interpreter)

    def clear(self) -> None:
        super().clear()
        self.factors.clear()
