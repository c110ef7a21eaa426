"""Scratch memory of operations: for what a reduce-scatter receives, and for values in other formats."""

from collections.abc import Sequence

from partita.plan.mesh_shape import MeshShape
from partita.plan.steps import AllGather, ReduceScatter, Step, in_phases

# Of a part that is summed as it arrives: with what it is added to it stays in the caches of small processors. So many
# pieces of it are awaited at a time.
PIECE_BYTES, NUM_AWAITED = 1 << 20, 4


def received_elements(sent: int, itemsize: int, num_ranks: int, *, in_pieces: bool) -> int:
    """Return the number of elements that a sum of ``sent`` elements over some ranks receives at a time.

    ``itemsize`` is in bytes. ``in_pieces``: ranks send each other their parts, and the rank that sums them takes each
    piece once it has come from all ranks (on ranks that compute on the host). Otherwise the backend sums, and one
    rank's part of the sum is received.
    """
    part = sent // num_ranks
    return (num_ranks - 1) * min(part, NUM_AWAITED * PIECE_BYTES // itemsize) if in_pieces else part


def scratch_bytes(ops: Sequence[Step], num_elements: int, itemsize: int, mesh: MeshShape, *, in_pieces: bool) -> int:
    """Return the most bytes that one of ``ops``, run in order from ``num_elements`` of ``itemsize`` bytes on, needs."""
    most = 0
    for op in in_phases(ops):
        if isinstance(op, ReduceScatter):
            size = mesh.group_size(op.axes)
            if not op.format.is_exact:
                most = max(most, op.format.sum_scratch_bytes(num_elements, op.axes, mesh))
            else:
                received = received_elements(num_elements, itemsize, size, in_pieces=in_pieces)
                most = max(most, itemsize * received)
            num_elements //= size
        elif isinstance(op, AllGather):
            num_elements *= mesh.group_size(op.axes)
            most = max(most, op.format.gather_scratch_bytes(num_elements))
    return most
