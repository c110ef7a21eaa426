"""Which :class:`GradientSync` a bucket has, by its row of the table."""

from partita.memory.tiers import StateMemory
from partita.sharding.average_sync import AverageSync
from partita.sharding.bucket_layout import BucketLayout
from partita.sharding.error_feedback import ErrorFeedbackSync
from partita.sharding.gradient_sync import GradientSync
from partita.sharding.low_rank_sync import LowRankSync


def make_syncs(layout: BucketLayout, row: int, memory: StateMemory) -> list[GradientSync]:
    """The sync of the warm-up, where the row has one, and that of all later steps.

    Args:
        row: this rank's row of the bucket.
    """
    planned = layout.segments[0].planned
    syncs = list[GradientSync]()
    if planned.row.wires.first is not None:
        syncs.append(GradientSync(layout, row, planned.gradients.warmup_phases))
    if not planned.gradients.error_sizes:
        syncs.append(GradientSync(layout, row, planned.gradients.phases))
    elif planned.gradients.factors is not None:
        syncs.append(LowRankSync(layout, row, memory))
    elif planned.gradients.send_averages:
        syncs.append(AverageSync(layout, row, memory))
    else:
        syncs.append(ErrorFeedbackSync(layout, row, memory))
    return syncs
