"""Planned buckets: groups of gradients that are reduced together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from partita.table.mesh_shape import MeshShape
from partita.table.planned import PlannedSegment
from partita.table.planned_gradients import PlannedGradients
from partita.table.scratch import scratch_bytes
from partita.table.state_plan import StatePlan

# Small segments share a bucket up to this size; it bounds the number of messages, not the memory.
BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class PlannedBucket:
    """Segments whose gradients are collected and reduced together.

    Their gradients have the same residence, mesh and axes of copies (:func:`share_buckets`), so the plan of the first
    segment is that of all.
    """

    segments: tuple[PlannedSegment, ...]

    @property
    def row(self) -> StatePlan:
        """The row of the table."""
        return self.segments[0].row

    @property
    def mesh(self) -> MeshShape:
        """The mesh to which the row's axes refer."""
        return self.segments[0].mesh

    @property
    def gradients(self) -> PlannedGradients:
        """The plan of the gradients: where they are collected, and how they are summed."""
        return self.segments[0].gradients

    @property
    def num_shards(self) -> int:
        """Number of ranks that each sum a shard."""
        return self.segments[0].layout.num_shards

    @cached_property
    def num_elements(self) -> int:
        """Elements of all shards, padding included."""
        return sum(segment.layout.padded for segment in self.segments)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all shards in the encoding in which gradients are collected."""
        return sum(segment.gradients.num_bytes for segment in self.segments)

    @property
    def num_members(self) -> int:
        """Number of parameters."""
        return sum(len(segment.layout.spans) for segment in self.segments)

    def scratch_bytes(self, *, in_pieces: bool) -> int:
        """Return the scratch memory of the bucket's sums and gathers, those of the warm-up included.

        Args:
            in_pieces: see :func:`~partita.table.scratch.received_elements`.
        """
        moves = [(sync.sums, self.num_elements) for sync in self.gradients.syncs]
        further = [self.gradients.copy_steps, *(sync.gathers for sync in self.gradients.syncs)]
        moves += [(operations, self.num_elements // self.num_shards) for operations in further]
        itemsize = self.row.grad_step.encoding.itemsize
        return max(scratch_bytes(ops, num, itemsize, self.mesh, in_pieces=in_pieces) for ops, num in moves)


def share_buckets(segments: Sequence[PlannedSegment], max_bytes: int = BUCKET_BYTES) -> list[PlannedBucket]:
    """Return the buckets of the segments, in the order in which they are reduced.

    Adjacent segments share a bucket if their gradients have the same residence and axes of copies, and fit in
    ``max_bytes``. Segments with copies on other stages share none, because their neighbours differ between stages. A
    gradient that is not sharded has its own bucket, so that it keeps its parameter's shape.
    """
    groups: list[list[PlannedSegment]] = []
    free_bytes, before = 0, None
    for segment in segments:
        stored = (segment.row.grad_step, segment.row.master.tier, segment.row.copies)
        if (
            stored == before
            and not segment.row.copies.is_tied
            and segment.gradients.num_bytes <= free_bytes
            and segment.num_shards(segment.row.grad_step) > 1
        ):
            groups[-1].append(segment)
            free_bytes -= segment.gradients.num_bytes
        else:
            groups.append([segment])
            free_bytes = max_bytes - segment.gradients.num_bytes
            before = stored
    return [PlannedBucket(tuple(group)) for group in groups]
