"""Error feedback: what codes of gradients lose is added to what is sent next.

Each rank keeps the error of the values that it sends, in units of the mean gradient; what counts is the sum over the
ranks. It changes when a step ends in an update: until then there are the values before it and the values after it, so
that a step that is left out leaves nothing behind. The error of a rank's own part is added as it is, not encoded: a
checkpoint brings the whole sum there (:meth:`ErrorFeedbackSync.settle`), in the run that goes on and in one that loads
it.

Sources: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD",
2019.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.compression.quantized import Quantized, WithErrors
from partita.memory.streams import finish
from partita.memory.tiers import StateMemory
from partita.plan.mesh_shape import MeshShape
from partita.plan.planned_gradients import PlannedGradients
from partita.plan.residence import FP32, Residence, Tier
from partita.plan.steps import AllGather, ReduceScatter, Step, in_phases, steps
from partita.plan.strategies import KeptState, Operations
from partita.sharding.gradient_buffer import BucketLayout, Piece
from partita.sharding.gradient_sync import CustomSync, GradientSync, SyncCall, Unused
from partita.sharding.interpreter import Interpreter
from partita.sharding.segment import Segment

# The errors as they were before the step, and as they will be if the step ends in an update.
COPIES = 2


@dataclass(frozen=True)
class ErrorFeedbackPlan(CustomSync):
    """Sums in codes that keep their errors.

    Attributes:
        residual: where the errors are kept. Each rank has its own, and what counts is their sum.
    """

    residual: Residence

    def make(self, layout: BucketLayout, memory: StateMemory) -> GradientSync:
        return ErrorFeedbackSync(layout, self, memory)

    def error_sizes(self, gradients: PlannedGradients) -> tuple[int, ...]:
        """Return the elements of the errors of one segment: in each sum over a group, and in the gather of the sums."""
        num_elements, sizes, mesh = gradients.layout.padded, list[int](), gradients.mesh
        for op in (*self.sums, *self.gathers):
            if isinstance(op, ReduceScatter):
                for axes in op.format.groups_of_sum(op.axes, mesh):
                    sizes += [num_elements] if _keeps_errors(op) else []
                    num_elements //= mesh.group_size(axes)
            elif isinstance(op, AllGather):
                sizes += [num_elements] if _keeps_errors(op) else []
                num_elements *= mesh.group_size(op.axes)
        return tuple(sizes)

    def exact_sums(self, gradients: PlannedGradients) -> Operations:
        """Return the operations from the errors of each rank to their sums, with nothing lost on the way."""
        errors = replace(self.residual, tier=Tier.DEVICE)
        summed = replace(errors, shard_axes=gradients.row.part_axes, partial_axes=())
        return in_phases(steps(errors, summed, gradients.mesh))

    def kept(self, gradients: PlannedGradients) -> Iterator[KeptState]:
        num_bytes = COPIES * sum(map(FP32.num_bytes, self.error_sizes(gradients)))
        yield KeptState("feedback", self.residual, num_bytes)

    def working_bytes(self, gradients: PlannedGradients) -> int:
        is_away = self.residual.tier is not Tier.DEVICE
        return sum(map(FP32.num_bytes, self.error_sizes(gradients))) if is_away else 0


def _keeps_errors(op: Step) -> bool:
    """Return whether an operation quantizes with error feedback."""
    if not isinstance(op, AllGather | ReduceScatter):
        return False
    return isinstance(op.format, Quantized) and op.format.keeps_errors


def with_errors(operations: Operations, levels: Sequence[Tensor], mesh: MeshShape) -> Operations:
    """Return the operations with the errors of each that keeps some, taken from ``levels`` in order."""
    found, remaining = list[Step](), list(levels)
    for op in operations:
        if isinstance(op, AllGather | ReduceScatter) and _keeps_errors(op):
            assert isinstance(op.format, Quantized)
            num = len(op.format.groups_of_sum(op.axes, mesh)) if isinstance(op, ReduceScatter) else 1
            op = replace(op, format=WithErrors(op.format, remaining[:num]))
            del remaining[:num]
        found.append(op)
    return tuple(found)


class ErrorFeedbackSync(GradientSync):
    """Sums one bucket in codes that keep their errors.

    The errors are of ``[num_rows * num_columns]`` values for the first sum, of this rank's part of that for each
    further one, and of this rank's row for a gather of the sums: the plan's ``error_sizes``, called levels here.
    """

    keeps_errors = True

    def __init__(self, layout: BucketLayout, plan: ErrorFeedbackPlan, memory: StateMemory) -> None:
        super().__init__(layout, plan)
        self._tier = plan.residual.tier
        self._mesh = layout.planned.mesh
        self._exact_sums = plan.exact_sums(layout.planned.gradients)
        self._is_first_copy = layout.is_saved
        per_segment = [plan.error_sizes(segment.planned.gradients) for segment in layout.segments]
        self._sizes = [sum(sizes) for sizes in zip(*per_segment, strict=True)]
        self.errors = self._kept(memory)
        self._next_errors = self._kept(memory)
        self._is_open = False  # codes were sent since the last update

    def _kept(self, memory: StateMemory) -> Tensor:
        kept = memory.keep("feedback", sum(self._sizes), torch.float32, self._tier)
        return kept.lend().tensor

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        with self._levels_lent(scale, call.interpreter.device) as levels:
            ops = with_errors(self._sum_operations, levels, self._mesh)
            call.interpreter.run(ops, full, out, purpose="gradients", accumulate=add, scratch=call.scratch)

    def gather(self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, unused: Unused) -> None:
        assert full is not None
        with self._levels_lent(1.0, call.interpreter.device) as levels:
            ops = with_errors(self._gather_operations, levels[-1:], self._mesh)
            call.interpreter.run(ops, shard, full.view(-1), purpose="gradients", scratch=call.scratch)

    @contextmanager
    def _levels_lent(self, scale: float, device: torch.device) -> Iterator[list[Tensor]]:
        """The errors of each level, in memory of the ``device``, for gradients that are multiplied by ``scale``. What
        they are afterwards becomes valid with the update.
        """
        values = self._next_errors
        if not self._is_open:
            (first, *further), (next_first, *others) = self._levels(self.errors), self._levels(values)
            self._begin(first, next_first)
            for kept, level in zip(further, others, strict=True):
                level.copy_(kept)
        values = values.to(device)
        self._is_open = True
        if scale != 1.0:
            values.mul_(scale)
        yield self._levels(values)
        if scale != 1.0:
            values.mul_(1.0 / scale)
        self.layout.clear_gaps(self._levels(values)[0].view(self.layout.num_rows, -1))
        if values is not self._next_errors:
            self._next_errors.copy_(values)

    def _begin(self, errors: Tensor, sent: Tensor) -> None:
        """Write into ``sent`` what is added to the first sum of a step: the errors of the last one."""
        sent.copy_(errors)

    def drop_unused(self, shard: Tensor, unused: Unused) -> None:
        for piece in (piece for pieces in unused for piece in pieces if piece.row == self.row):
            piece.of(shard).zero_()

    def commit(self, unused: Unused) -> None:
        if not self._is_open:
            return
        for pieces in unused:
            for before, after in self._places(pieces):
                after.copy_(before)
        self.errors, self._next_errors = self._next_errors, self.errors
        self._is_open = False

    def discard(self) -> None:
        self._is_open = False

    def clear(self) -> None:
        self.errors.zero_()
        self._is_open = False

    @property
    def own(self) -> Tensor:
        """The errors of this rank's own row, ``[num_columns]``: all there are after :meth:`settle`."""
        first: Tensor = self._levels(self.errors)[0]
        return first.view(self.layout.num_rows, -1)[self.row]

    def saved(self, segment: Segment) -> Tensor | None:
        parts: Sequence[Tensor] = self.own.split([each.layout.part_elements for each in self.layout.segments])
        return next(part for each, part in zip(self.layout.segments, parts, strict=True) if each is segment)

    def settle(self, interpreter: Interpreter) -> None:
        """Bring the sum of the errors over the ranks, exactly, into each rank's :attr:`own`."""
        assert not self._is_open
        values = self.errors.to(interpreter.device)
        first, *further = self._levels(values)
        rows = first.view(self.layout.num_rows, -1)
        for level in further:
            part = level.view(-1, self.layout.num_columns)
            rows[self._rows_of(len(part))] += part
        total = torch.empty_like(rows[self.row])
        num_bytes = interpreter.scratch_bytes(self._exact_sums, first.numel(), first.itemsize)
        scratch = torch.empty(num_bytes // first.itemsize, dtype=first.dtype, device=interpreter.device)
        interpreter.run(self._exact_sums, first, total, purpose="gradients", scratch=scratch)
        self.errors.zero_()
        if self._is_first_copy:
            self.own.copy_(total)
        finish(interpreter.device)

    def _levels(self, values: Tensor) -> list[Tensor]:
        parts: Sequence[Tensor] = values.split(self._sizes)
        return list(parts)

    def _rows_of(self, num: int) -> slice:
        """The rows of a sum to which a rank gives ``num`` of them: its own with every so many before and after, or with
        those beside it, where there is an operation for each sum.
        """
        if self._sums_in_turn:
            first = self.row // num * num
            return slice(first, first + num)
        apart = self.layout.num_rows // num
        return slice(self.row % apart, None, apart)

    def _places(self, pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """A parameter's errors before and after the step, in every level."""
        for errors, following in zip(self._levels(self.errors), self._levels(self._next_errors), strict=True):
            before, after = (values.view(-1, self.layout.num_columns) for values in (errors, following))
            rows = range(self.layout.num_rows)[self._rows_of(len(before))]
            for piece in pieces:
                if piece.row in rows:
                    number = rows.index(piece.row)
                    yield piece.of(before[number]), piece.of(after[number])
