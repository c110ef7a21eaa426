"""1-bit Adam: ranks send their gradients' share of the optimizer's running average (Tang et al., "1-bit Adam", 2021).

All ranks have the last average, so each sends the codes of that and its own gradient; the mean of these is the next
average, which goes back to all in codes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from partita.compression.error_feedback import ErrorFeedbackPlan, ErrorFeedbackSync, with_errors
from partita.memory.tiers import StateMemory
from partita.plan.formats import FULL, Format
from partita.plan.planned_gradients import PlannedGradients
from partita.plan.residence import FP32, Tier
from partita.plan.steps import in_formats, steps
from partita.plan.strategies import KeptState, Operations
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.gradient_sync import StateOf, SyncCall, Unused
from partita.sharding.interpreter import Interpreter
from partita.sharding.unit import Member


@dataclass(frozen=True)
class AveragePlan(ErrorFeedbackPlan):
    """Sums the running averages, and gathers them on all ranks.

    Attributes:
        momentum: what the last average counts in the next one (Adam's beta1).
        exact_gathers: the gathers with all values as they are.
    """

    momentum: float
    exact_gathers: Operations

    def make(self, layout: BucketLayout, memory: StateMemory) -> "AverageSync":
        return AverageSync(layout, self, memory)

    def kept(self, gradients: PlannedGradients) -> Iterator[KeptState]:
        yield from super().kept(gradients)
        yield KeptState("momentum", self.residual, FP32.num_bytes(gradients.layout.padded))


def average_gathers(gradients: PlannedGradients, form: Format = FULL) -> Operations:
    """Return the operations from the averages, which a rank measures its part of, to those that all ranks have."""
    row = gradients.row
    summed = replace(row.grad_step, shard_axes=row.part_axes, encoding=FP32, tier=Tier.DEVICE)
    return in_formats(steps(summed, replace(summed, shard_axes=()), gradients.mesh), FULL, form)


class AverageSync(ErrorFeedbackSync):
    """Sums running averages: the optimizer receives the new average in place of a gradient."""

    gathers = True

    def __init__(self, layout: BucketLayout, plan: AveragePlan, memory: StateMemory) -> None:
        super().__init__(layout, plan, memory)
        planned = layout.planned
        size, copies = planned.mesh.group_size, planned.row.copies
        self._momentum = plan.momentum
        # How often the last average would count in the sum, over the copies too.
        self._num_added = size(planned.row.summed_axes) * size(copies.axes) * planned.gradients.copy_factor
        self._exact_gathers = plan.exact_gathers
        self._sees_whole = size(planned.row.grad_step.shard_axes) == 1
        self.average = memory.keep("momentum", layout.num_elements, torch.float32, self._tier).lend().tensor

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        full.mul_(1.0 - self._momentum)
        super()._sum(full, out, call, add=add, scale=scale)

    def _begin(self, errors: Tensor, sent: Tensor) -> None:
        torch.add(errors, self.average, alpha=self._momentum / self._num_added, out=sent)

    def gather(self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, unused: Unused) -> None:
        """Bring the new averages, of which each rank has its row, to all of them. Of the ``unused`` the last one stays.
        All ranks have what they decode, also of their own row.
        """
        rows = self.average.view(self.layout.num_rows, -1)
        places = [piece.of(rows[piece.row]) for pieces in unused for piece in pieces]
        last = [values.clone() for values in places]
        with self._levels_lent(1.0, call.interpreter.device) as levels:
            ops = with_errors(self._gather_operations, levels[-1:], self._mesh)
            call.interpreter.run(ops, shard.float(), self.average, purpose="gradients", scratch=call.scratch)
        self.layout.clear_gaps(rows)
        for values, before in zip(places, last, strict=True):
            values.copy_(before)
        shard.copy_(rows[self.row])
        if self._sees_whole and full is not None:
            full.view(-1).copy_(self.average)

    def start(self, members: Sequence[Member], state_of: StateOf, interpreter: Interpreter) -> None:
        """Have all ranks know the optimizer's averages, of which each has its parts."""
        row = torch.zeros(self.layout.num_columns, dtype=torch.float32, device=interpreter.device)
        for member in members:
            if (values := state_of(member, "exp_avg")) is not None:
                for piece in (piece for piece in self.layout.pieces[id(member)] if piece.row == self.row):
                    begin = piece.start if values.numel() == member.span.num_elements else 0
                    piece.of(row).copy_(values[begin : begin + piece.stop - piece.start])
        interpreter.run(self._exact_gathers, row, self.average, purpose="gradients")
