"""PowerSGD: sums of matrices as two thin factors, whose error is sent with the next ones (Vogels et al., 2019)."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from partita.comm.transport import write_out
from partita.compression.error_feedback import ErrorFeedbackPlan, ErrorFeedbackSync
from partita.compression.factors import Factors, FactorShapes
from partita.memory.tiers import StateMemory
from partita.plan.planned_bucket import PlannedBucket
from partita.plan.planned_gradients import PlannedGradients
from partita.plan.residence import FP32
from partita.plan.strategies import Message, Operations
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.gradient_sync import SyncCall, Unused
from partita.sharding.interpreter import Interpreter


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
