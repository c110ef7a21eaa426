"""Predicted traffic report: the bytes that a rank sends in a step, computed from the state table.

With P the padded bytes of the parameters on N ranks, data parallelism sends 2P (N-1)/N per rank and step, and so do
stages 1 and 2; stage 3 sends 3P (N-1)/N, or 2P (N-1)/N where parameters stay unsharded between forward and backward
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 7). Control
messages of a few bytes each are counted as well.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.layout.operations import (
    Operation,
    completions,
    publications,
    reductions,
    rounds,
    unshards,
    unshards_for_backward,
)
from partita.table.mesh_shape import AXES, BATCH_AXES, PIPELINE_AXES, MeshShape
from partita.table.planned import PlannedUnit, reduction_order
from partita.table.planned_bucket import PlannedBucket, share_buckets
from partita.table.traffic import TrafficKey, TrafficMeter, TrafficReport

# Bytes of a number in a control message: a count of all-gathers or of reduce passes, a part of the norm, a loss.
WORD_BYTES = 8
# Bytes of the loss that the last pipeline stage sends to the other stages.
LOSS_BYTES = 4
# The purpose of exchanges with owners.
UPDATES = "updates"


@dataclass(frozen=True)
class StepShape:
    """The properties of a step that determine its traffic.

    Attributes:
        accumulate: micro-batches, each a forward and a backward of every unit.
        num_reduced: the number of backwards after which sharded gradients are reduced (0: only at the step); None: all
            backwards, as without ``no_sync``.
        returns_loss: the mean loss over the ranks is computed, as in ``train_batch``; the ranks then also exchange
            the number of micro-batches that each has read.
        syncs_each_micro_batch: ranks with sharded parameters exchange a message at the end of each micro-batch, as over
            gloo. On accelerators they do not, once a step has gathered its units in the order of the step before.
        ends_round: replicas that train separately average their weights in this step.
        is_warming_up: the step belongs to the warm-up.
        chunks: pipeline stages per rank; each runs its own forwards and backwards.
    """

    accumulate: int = 1
    num_reduced: int | None = None
    returns_loss: bool = False
    syncs_each_micro_batch: bool = True
    ends_round: bool = False
    is_warming_up: bool = False
    chunks: int = 1

    @property
    def num_backwards(self) -> int:
        """The number of backwards in a step, over all chunks."""
        return self.accumulate * self.chunks


def step_traffic(
    units: Sequence[PlannedUnit], shape: StepShape = StepShape(), updates: Iterable[Operation] = ()
) -> TrafficReport:
    """Return the traffic of a rank in a step in which every trained parameter gets a gradient.

    It is equal on all ranks, except that of ``updates``. Buffers that the forward changes (running statistics) are not
    in the plan, and not included.

    Args:
        updates: the rank's exchanges with owners of parameters (:class:`~partita.layout.owners.Exchanges`).
    """
    phase = 0 if shape.is_warming_up else -1
    sent = _TrafficCounter(units[0].segments[0].mesh)
    enclosing = {"", *(name for unit in units for name in unit.inside)}  # units whose forward runs in all chunks
    for unit in units:
        if not unit.always_unsharded:
            sent.gathers(unit, shape, shape.chunks if unit.name in enclosing else 1)
    segments = reduction_order(units)
    buckets = share_buckets(segments)
    num_reduced = shape.num_backwards if shape.num_reduced is None else max(1, shape.num_reduced)
    for bucket in buckets:
        sent.reductions(bucket, num_reduced, phase)
    for segment in segments:
        sent.count(publications(segment, phase), "parameters")
    for segment in segments if shape.ends_round else ():
        for purpose, operation in rounds(segment, is_warming_up=shape.is_warming_up):
            sent.count([operation], purpose)
    sent.count(updates, UPDATES)
    if shape.syncs_each_micro_batch and not all(unit.always_unsharded for unit in units):
        sent.messages(units[0].row.mean_axes, WORD_BYTES, shape.num_backwards)
    num_members = sum(len(segment.layout.spans) for segment in segments)
    copied = Counter[tuple[str, ...]]()
    for segment in segments:
        copied[segment.row.copies.axes] += len(segment.layout.spans)
    for axes, num in copied.items():
        sent.messages(axes, num)  # used parameters, over the copies
    # Number of reduce passes, written gradients, the gradients' scale; used parameters, and unreduced buckets.
    summed_axes = units[0].row.mean_axes
    sent.messages(summed_axes, 3 * WORD_BYTES + len(buckets) + num_members)
    if all(segment.row.stores_gradients for segment in segments):
        sent.messages(AXES, 3 * WORD_BYTES)  # the norm, the gradients' scale, a flag of written gradients
    if shape.returns_loss:
        sent.messages(AXES, WORD_BYTES)  # the number of micro-batches
        sent.messages(PIPELINE_AXES, LOSS_BYTES)
        sent.messages(BATCH_AXES, WORD_BYTES)  # the loss
    return sent.meter.report()


class _TrafficCounter:
    """Counter of the bytes that a rank sends."""

    def __init__(self, mesh: MeshShape) -> None:
        self.meter = TrafficMeter()
        self._mesh = mesh

    def gathers(self, unit: PlannedUnit, shape: StepShape, times: int) -> None:
        """Add a unit's all-gathers for forward and backward, ``times`` of each per micro-batch."""
        num_gathers = times * shape.accumulate * (1 if unit.stays_unsharded else 2)
        for segment in unit.segments:
            # The secondary shard is stored from forward to the step.
            num_secondary = num_gathers - 1 if segment.has_secondary else 0
            self.count(unshards(segment), "parameters", num_gathers - num_secondary)
            self.count(unshards_for_backward(segment), "parameters", num_secondary)

    def reductions(self, bucket: PlannedBucket, num_reduced: int, phase: int) -> None:
        """Add the reductions of one bucket.

        They run after each micro-batch if gradients are stored in shards until the step; if not, at the step. For
        gradients that are not stored, norms and flags of used parameters are also summed.
        """
        row = bucket.row
        calls = 1 if self._mesh.active(row.grad_between.partial_axes) else num_reduced
        self.count(reductions(bucket, phase), "gradients", calls)
        self.count(completions(bucket, phase), "gradients")
        axes = self._mesh.named(AXES)
        if not row.stores_gradients and axes:
            num, num_words = self._mesh.group_size(axes), len(bucket.segments) + bucket.num_members
            self.meter.add(TrafficKey("all_reduce", axes, "control"), 2 * (num - 1) * num_words * WORD_BYTES // num)

    def messages(self, axes: tuple[str, ...], num_bytes: int, calls: int = 1) -> None:
        """Add messages of ``num_bytes`` that each rank of a group sends to all other ranks."""
        if named := self._mesh.named(axes):
            num = self._mesh.group_size(named)
            self.meter.add(TrafficKey("all_gather", named, "control"), calls * (num - 1) * num_bytes, calls)

    def count(self, operations: Iterable[Operation], purpose: str, calls: int = 1) -> None:
        """Add each of the operations ``calls`` times."""
        for each in operations if calls else ():
            self.meter.add(TrafficKey(each.collective, each.axes, purpose), calls * each.num_bytes, calls)
