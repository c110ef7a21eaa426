"""1-bit Adam: ranks send their gradients' share of the optimizer's running average (Tang et al., "1-bit Adam", 2021).

All ranks have the last average, so each sends the codes of that and its own gradient; the mean of these is the next
average, which goes back to all in codes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from partita.memory.tiers import StateMemory
from partita.plan.wire import FULL
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.error_feedback import ErrorFeedbackSync
from partita.sharding.gradient_sync import AverageOf, SyncCall, Unused
from partita.sharding.movement import Movement, finish_all
from partita.sharding.unit import Member


class AverageSync(ErrorFeedbackSync):
    """What it leaves for the optimizer is the new average, not a gradient."""

    gathers = True

    def __init__(self, layout: BucketLayout, row: int, memory: StateMemory) -> None:
        super().__init__(layout, row, memory)
        planned = layout.segments[0].planned
        size, copies = planned.mesh.group_size, planned.row.copies
        self._momentum = planned.row.wires.momentum
        # How often the last average would count in the sum, over the copies too.
        self._num_added = size(planned.row.summed_axes) * size(copies.axes) * planned.gradients.copy_factor
        self._back = planned.gradients.average_steps(planned.row.wires.sums)
        self._exactly_back = planned.gradients.average_steps(FULL)
        self._sees_whole = planned.num_shards(planned.row.grad_step) == 1
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
        with self._levels_lent(1.0, call.movement.device) as levels:
            moving = call.movement.holding(levels[-1:])
            begun = moving.begin(self._back, shard.float(), self.average, purpose="gradients", received=call.scratch)
            finish_all(begun)
        self.layout.clear_gaps(rows)
        for values, before in zip(places, last, strict=True):
            values.copy_(before)
        shard.copy_(rows[self.row])
        if self._sees_whole and full is not None:
            full.view(-1).copy_(self.average)

    def start(self, members: Sequence[Member], average_of: AverageOf, movement: Movement) -> None:
        """Have all ranks know the optimizer's averages, of which each has its parts."""
        row = torch.zeros(self.layout.num_columns, dtype=torch.float32, device=movement.device)
        for member in members:
            if (values := average_of(member)) is not None:
                for piece in (piece for piece in self.layout.pieces[id(member)] if piece.row == self.row):
                    begin = piece.start if values.numel() == member.span.num_elements else 0
                    piece.of(row).copy_(values[begin : begin + piece.stop - piece.start])
        finish_all(movement.begin(self._exactly_back, row, self.average, purpose="gradients"))
