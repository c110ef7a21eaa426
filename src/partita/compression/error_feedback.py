"""Error feedback: the quantization error of gradients is added to the gradients of the next step.

Each rank keeps a *residual*: the error of the values that it sent, in units of the mean gradient. Only the sum of the
residuals over the ranks matters. There are two copies, from before and after the step: the second one becomes valid
with the update, so a skipped step changes nothing. The residual of a rank's own shard is added without encoding. For
checkpoints, :meth:`ErrorFeedbackSync.prepare_for_checkpoint` moves the sum of all residuals there, in this run too.

Sources: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD",
2019.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.compression.quantized import Quantized, WithResiduals
from partita.memory.streams import finish
from partita.memory.tiers import StateMemory
from partita.sharding.gradient_buffer import BucketLayout, Piece
from partita.sharding.gradient_sync import CustomSync, GradientSync, SyncCall, Unused
from partita.sharding.interpreter import Interpreter
from partita.sharding.segment import Segment
from partita.table.mesh_shape import MeshShape
from partita.table.planned_gradients import PlannedGradients
from partita.table.residence import FP32, Residence, Tier
from partita.table.steps import AllGather, ReduceScatter, Step, in_phases, steps
from partita.table.strategies import KeptState, Operations

# The residuals from before the step, and those that become valid with the update.
COPIES = 2


@dataclass(frozen=True)
class ErrorFeedbackPlan(CustomSync):
    """Plan of quantized sums with error feedback.

    Attributes:
        residual: the residence of the residuals. Each rank has its own ones, and their sum matters.
    """

    residual: Residence

    def make(self, layout: BucketLayout, memory: StateMemory) -> GradientSync:
        return ErrorFeedbackSync(layout, self, memory)

    def residual_sizes(self, gradients: PlannedGradients) -> tuple[int, ...]:
        """Return the sizes of a segment's residuals: for each sum over a group, and for the gather of the sums."""
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
        """Return the operations that sum the residuals of all ranks, uncompressed."""
        residuals = replace(self.residual, tier=Tier.DEVICE)
        summed = replace(residuals, shard_axes=gradients.row.gradient_shard_axes, partial_axes=())
        return in_phases(steps(residuals, summed, gradients.mesh))

    def kept(self, gradients: PlannedGradients) -> Iterator[KeptState]:
        num_bytes = COPIES * sum(map(FP32.num_bytes, self.residual_sizes(gradients)))
        yield KeptState("feedback", self.residual, num_bytes)

    def working_bytes(self, gradients: PlannedGradients) -> int:
        is_offloaded = self.residual.tier is not Tier.DEVICE
        return sum(map(FP32.num_bytes, self.residual_sizes(gradients))) if is_offloaded else 0


def limit_to_range(values: Tensor) -> None:
    """Replace infinities in fp16 by the largest number: the measured sums are finite, decoded ones may be larger."""
    if values.dtype == torch.float16:
        largest = torch.finfo(values.dtype).max
        values.clamp_(-largest, largest)


def _keeps_errors(op: Step) -> bool:
    """Return True if an operation quantizes with error feedback."""
    if not isinstance(op, AllGather | ReduceScatter):
        return False
    return isinstance(op.format, Quantized) and op.format.has_error_feedback


def with_residuals(operations: Operations, residuals: Sequence[Tensor], mesh: MeshShape) -> Operations:
    """Return the operations with their ``residuals``, which are in the order of the operations that keep some."""
    found, remaining = list[Step](), list(residuals)
    for op in operations:
        if isinstance(op, AllGather | ReduceScatter) and _keeps_errors(op):
            assert isinstance(op.format, Quantized)
            num = len(op.format.groups_of_sum(op.axes, mesh)) if isinstance(op, ReduceScatter) else 1
            op = replace(op, format=WithResiduals(op.format, remaining[:num]))
            del remaining[:num]
        found.append(op)
    return tuple(found)


class ErrorFeedbackSync(GradientSync):
    """Quantized sums of one bucket with error feedback.

    The sizes of the residuals are the plan's ``residual_sizes``: ``[num_rows * num_columns]`` for the first sum, this
    rank's shard of that for each further sum, and this rank's row for a gather of the sums.
    """

    has_error_feedback = True

    def __init__(self, layout: BucketLayout, plan: ErrorFeedbackPlan, memory: StateMemory) -> None:
        super().__init__(layout, plan)
        self._tier = plan.residual.tier
        self._mesh = layout.planned.mesh
        self._exact_sums = plan.exact_sums(layout.planned.gradients)
        self._is_first_copy = layout.is_saved
        per_segment = [plan.residual_sizes(segment.planned.gradients) for segment in layout.segments]
        self._sizes = [sum(sizes) for sizes in zip(*per_segment, strict=True)]
        self.residuals = self._allocate(memory)
        self._next_residuals = self._allocate(memory)
        self._is_open = False  # True if gradients were sent since the last update

    def _allocate(self, memory: StateMemory) -> Tensor:
        kept = memory.keep("feedback", sum(self._sizes), torch.float32, self._tier)
        return kept.lease().tensor

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        with self._step_residuals(scale, call.interpreter.device) as residuals:
            ops = with_residuals(self._sum_operations, residuals, self._mesh)
            call.interpreter.run(ops, full, out, purpose="gradients", accumulate=add, scratch=call.scratch)

    def gather(
        self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, scale: float, unused: Unused
    ) -> None:
        assert full is not None
        with self._step_residuals(scale, call.interpreter.device) as residuals:
            ops = with_residuals(self._gather_operations, residuals[-1:], self._mesh)
            call.interpreter.run(ops, shard, full.view(-1), purpose="gradients", scratch=call.scratch)
        limit_to_range(full)

    @contextmanager
    def _step_residuals(self, scale: float, device: torch.device) -> Iterator[list[Tensor]]:
        """Yield the residuals, one tensor per sum or gather, on ``device``, multiplied by the gradients' ``scale``.

        The operations write the new residuals into them, which become valid with the update.
        """
        values = self._next_residuals
        if not self._is_open:
            (first, *further), (next_first, *others) = self._split(self.residuals), self._split(values)
            self._begin(first, next_first)
            for before, after in zip(further, others, strict=True):
                after.copy_(before)
        values = values.to(device)
        self._is_open = True
        if scale != 1.0:
            values.mul_(scale)
        yield self._split(values)
        if scale != 1.0:
            values.mul_(1.0 / scale)
        self.layout.clear_gaps(self._split(values)[0].view(self.layout.num_rows, -1))
        if values is not self._next_residuals:
            self._next_residuals.copy_(values)

    def _begin(self, residual: Tensor, addend: Tensor) -> None:
        """Set the ``addend`` of a step's first sum to the ``residual`` of the last step."""
        addend.copy_(residual)

    def drop_unused(self, shard: Tensor, unused: Unused) -> None:
        for piece in (piece for pieces in unused for piece in pieces if piece.row == self.row):
            piece.of(shard).zero_()

    def commit(self, unused: Unused) -> None:
        if not self._is_open:
            return
        for pieces in unused:
            for before, after in self._places(pieces):
                after.copy_(before)
        self.residuals, self._next_residuals = self._next_residuals, self.residuals
        self._is_open = False

    def discard(self) -> None:
        self._is_open = False

    def clear(self) -> None:
        self.residuals.zero_()
        self._is_open = False

    @property
    def row_residual(self) -> Tensor:
        """The residual of this rank's row, ``[num_columns]``.

        After :meth:`prepare_for_checkpoint`, all others are zero.
        """
        first: Tensor = self._split(self.residuals)[0]
        return first.view(self.layout.num_rows, -1)[self.row]

    def saved(self, segment: Segment) -> Tensor | None:
        sizes = [each.layout.shard_elements for each in self.layout.segments]
        shards: Sequence[Tensor] = self.row_residual.split(sizes)
        return next(shard for each, shard in zip(self.layout.segments, shards, strict=True) if each is segment)

    def prepare_for_checkpoint(self, interpreter: Interpreter) -> None:
        """Move the exact sum of the residuals over the ranks into each rank's :attr:`row_residual`."""
        assert not self._is_open
        values = self.residuals.to(interpreter.device)
        first, *further = self._split(values)
        rows = first.view(self.layout.num_rows, -1)
        for residual in further:
            shard = residual.view(-1, self.layout.num_columns)
            rows[self._rows_of(len(shard))] += shard
        total = torch.empty_like(rows[self.row])
        num_bytes = interpreter.scratch_bytes(self._exact_sums, first.numel(), first.itemsize)
        scratch = torch.empty(num_bytes // first.itemsize, dtype=first.dtype, device=interpreter.device)
        interpreter.run(self._exact_sums, first, total, purpose="gradients", scratch=scratch)
        self.residuals.zero_()
        if self._is_first_copy:
            self.row_residual.copy_(total)
        finish(interpreter.device)

    def _split(self, values: Tensor) -> list[Tensor]:
        residuals: Sequence[Tensor] = values.split(self._sizes)
        return list(residuals)

    def _rows_of(self, num: int) -> slice:
        """Return the ``num`` rows that this rank has after a sum: evenly spaced rows that include its own.

        If each sum is a separate operation, they are adjacent rows.
        """
        if self._sums_in_turn:
            first = self.row // num * num
            return slice(first, first + num)
        spacing = self.layout.num_rows // num
        return slice(self.row % spacing, None, spacing)

    def _places(self, pieces: Sequence[Piece]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a parameter's residuals from before and after the step, for every sum or gather."""
        for old, new in zip(self._split(self.residuals), self._split(self._next_residuals), strict=True):
            before, after = (values.view(-1, self.layout.num_columns) for values in (old, new))
            rows = range(self.layout.num_rows)[self._rows_of(len(before))]
            for piece in pieces:
                if piece.row in rows:
                    number = rows.index(piece.row)
                    yield piece.of(before[number]), piece.of(after[number])
