"""A user-defined gradient sum in one file: every rank all-gathers all gradients, and sums its own part."""

from dataclasses import dataclass, replace

from torch import Tensor

from partita.config.extension import Extension
from partita.config.schema import Config
from partita.memory.tiers import StateMemory
from partita.sharding.gradient_buffer import BucketLayout
from partita.sharding.gradient_sync import CustomSync, GradientSync, SyncCall
from partita.table.mesh_shape import MeshShape
from partita.table.planned_bucket import PlannedBucket
from partita.table.planned_gradients import PlannedGradients
from partita.table.state_plan import StatePlan
from partita.table.strategies import Message, Strategies, SyncPlan


@dataclass(frozen=True)
class GatherPlan(CustomSync):
    def make(self, layout: BucketLayout, memory: StateMemory) -> GradientSync:
        return GatherSync(layout, self)

    def messages(self, bucket: PlannedBucket) -> list[Message]:
        axes = bucket.mesh.named(bucket.row.summed_axes)
        return [Message("all_gather", axes, (bucket.mesh.group_size(axes) - 1) * bucket.num_bytes)]


class GatherSync(GradientSync):
    def _sum(self, full: Tensor, out: Tensor, call: SyncCall, *, add: bool, scale: float) -> None:
        group = call.interpreter.group(self.layout.planned.row.summed_axes)
        every = full.new_empty(group.size, full.numel())
        group.all_gather(every.view(-1), full, "gradients").wait()
        total = every[0]
        for rank in range(1, group.size):
            total = total + every[rank]
        row = total.view(self.layout.num_rows, -1)[self.row]
        out.add_(row) if add else out.copy_(row)


@dataclass(frozen=True)
class Gathering(Strategies):
    def syncs(self, gradients: PlannedGradients) -> tuple[SyncPlan, ...]:
        return (GatherPlan((), gradients.exact.gathers),) if gradients.reductions else (gradients.exact,)


class OwnExtension(Extension):
    def row(self, config: Config, mesh: MeshShape, row: StatePlan) -> StatePlan:
        return replace(row, strategies=Gathering())
