"""Scratch memory of operations: for values that a reduce-scatter receives, and for values in other formats."""

from collections.abc import Sequence

from partita.table.mesh_shape import MeshShape
from partita.table.steps import AllGather, ReduceScatter, Step, in_phases

# Size of a piece of a shard that is summed on the host: it fits into small caches together with the sum. NUM_AWAITED
# pieces are received at a time.
PIECE_BYTES, NUM_AWAITED = 1 << 20, 4


def received_elements(sent: int, itemsize: int, num_ranks: int, *, in_pieces: bool) -> int:
    """Return the number of elements that a sum of ``sent`` elements over some ranks receives at a time.

    ``itemsize`` is in bytes. ``in_pieces``: ranks send each other their shards, and the rank that sums them adds each
    piece when it has arrived from all ranks (on ranks that compute on the host). Otherwise the backend sums, and one
    shard of the sum is received.
    """
    part = sent // num_ranks
    return (num_ranks - 1) * min(part, NUM_AWAITED * PIECE_BYTES // itemsize) if in_pieces else part


def scratch_bytes(ops: Sequence[Step], num_elements: int, itemsize: int, mesh: MeshShape, *, in_pieces: bool) -> int:
    """Return the maximum scratch bytes of ``ops``, run in order on ``num_elements`` of ``itemsize`` bytes."""
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
