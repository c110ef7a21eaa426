"""PowerSGD: sums of matrices as two thin factors, whose error is sent with the next ones (Vogels et al., 2019)."""

from torch import Tensor

from partita.comm.transport import write_out
from partita.memory.tiers import StateMemory
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.error_feedback import ErrorFeedbackSync
from partita.sharding.factors import Factors
from partita.sharding.gradient_sync import SyncCall, Unused
from partita.sharding.movement import Movement


class LowRankSync(ErrorFeedbackSync):
    """Every rank decodes the whole sum, so a gather has nothing to send. The factors start anew after a checkpoint."""

    def __init__(self, layout: BucketLayout, row: int, memory: StateMemory) -> None:
        super().__init__(layout, row, memory)
        plan = layout.segments[0].plan
        self.factors = Factors(layout, plan.wires.factor_rank)
        self._summed_axes = plan.summed_axes

    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        rows = full.view(self.layout.num_rows, -1)
        with self._levels_lent(scale, call.movement.device) as levels:
            self.factors.reduce(rows, levels[0].view_as(rows), call.movement.group(self._summed_axes))
            write_out(rows[self.row], out, accumulate=add)

    def gather(self, shard: Tensor, full: Tensor | None, call: SyncCall, *, factor: float, unused: Unused) -> None:
        if full is None or not self.factors.are_whole:
            super().gather(shard, full, call, factor=factor, unused=unused)
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

    def settle(self, movement: Movement) -> None:
        self.factors.clear()
        super().settle(movement)

    def clear(self) -> None:
        super().clear()
        self.factors.clear()
