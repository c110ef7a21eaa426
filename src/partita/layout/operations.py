"""The collectives of a step for each segment and each bucket, computed from the state table.

These are the only formulas of traffic: :mod:`~partita.layout.traffic` adds up the bytes, predictions add up the time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment
from partita.table.planned_bucket import PlannedBucket
from partita.table.residence import Residence
from partita.table.state_plan import StatePlan
from partita.table.steps import AllGather, Encode, ReduceScatter, Slice, Step, in_phases, steps


@dataclass(frozen=True)
class Operation:
    """One collective call of a rank.

    Attributes:
        collective: its name in traffic reports.
        axes: the mesh axes of its process group.
        num_bytes: the bytes that the rank sends.
        num_quantized: the number of elements that the rank quantizes or dequantizes for it.
    """

    collective: str
    axes: tuple[str, ...]
    num_bytes: int
    num_quantized: int = 0


def collectives(ops: Sequence[Step], src: Residence, padded: int, mesh: MeshShape) -> Iterator[Operation]:
    """Yield the collectives among ``ops`` on ``padded`` elements that are initially stored as ``src``.

    An all-reduce is a reduce-scatter, followed by an all-gather when the norm is known.
    """
    num_elements, encoding = src.num_elements(padded, mesh), src.encoding
    for op in in_phases(ops):
        if isinstance(op, Encode):
            encoding = op.encoding
        elif isinstance(op, AllGather):
            num = mesh.group_size(op.axes)
            num_elements *= num
            num_bytes = op.format.sent_bytes(num_elements, encoding, num)
            yield Operation("all_gather", op.axes, num_bytes, 0 if op.format.is_exact else padded)
        elif isinstance(op, ReduceScatter):
            num_quantized = 0 if op.format.is_exact else padded
            for axes in op.format.groups_of_sum(op.axes, mesh):
                num = mesh.group_size(axes)
                num_bytes = op.format.sent_bytes(num_elements, encoding, num)
                yield Operation(op.format.sum_collective, axes, num_bytes, num_quantized)
                num_elements //= num
                num_quantized = 0
        elif isinstance(op, Slice):
            num_elements //= mesh.group_size(op.axes)


def unshards(segment: PlannedSegment) -> Iterable[Operation]:
    """Return the collectives that unshard a segment's stored parameters."""
    return collectives(segment.unshards, segment.row.param_stored, segment.layout.padded, segment.mesh)


def unshards_for_backward(segment: PlannedSegment) -> Iterable[Operation]:
    """Return the collectives that unshard a segment for backward: from its secondary shard, if it has one."""
    if not segment.has_secondary:
        return unshards(segment)
    row = segment.row
    ops = steps(row.param_between, row.param_compute, segment.mesh)
    return collectives(ops, row.param_between, segment.layout.padded, segment.mesh)


def reductions(bucket: PlannedBucket, phase: int = -1) -> Iterator[Operation]:
    """Yield the collectives that sum a bucket's gradients after a backward.

    Args:
        phase: 0: the warm-up; -1: all later steps.
    """
    sync = bucket.gradients.syncs[phase]
    yield from collectives(sync.sums, _gradients_before_sum(bucket.row), bucket.num_elements, bucket.mesh)
    for message in sync.messages(bucket):
        yield Operation(message.collective, message.axes, message.num_bytes)


def completions(bucket: PlannedBucket, phase: int = -1) -> Iterator[Operation]:
    """Yield the collectives on the sums at a step: sums over copies, and all-gathers of gradients for the optimizer.

    Args:
        phase: as for :func:`reductions`.
    """
    gradients = bucket.gradients
    summed = replace(bucket.row.grad_step, shard_axes=bucket.row.gradient_shard_axes)
    for ops in (gradients.copy_steps, gradients.syncs[phase].gathers):
        yield from collectives(ops, summed, bucket.num_elements, bucket.mesh)


def publications(segment: PlannedSegment, phase: int = -1) -> Iterable[Operation]:
    """Return the collectives that publish a segment's updated weights; ``phase`` as for :func:`reductions`."""
    ops = segment.publishes[phase].operations
    return collectives(ops, segment.row.master, segment.layout.padded, segment.mesh)


def rounds(segment: PlannedSegment, *, is_warming_up: bool = False) -> Iterator[tuple[str, Operation]]:
    """Yield (purpose, collective) for the end of a round of replicas that train separately."""
    for transfer in segment.row.strategies.of_round(segment, is_warming_up=is_warming_up):
        for op in collectives(transfer.operations, transfer.source, segment.layout.padded, segment.mesh):
            yield transfer.purpose, op


def _gradients_before_sum(row: StatePlan) -> Residence:
    """Return the residence of gradients before they are summed: on the device, in the encoding of their storage."""
    return replace(row.grad_arrival, encoding=row.grad_step.encoding)
