"""Bytes of model states that a rank holds, straight from the table: the ledger's figures before anything is allocated.

For 16-bit compute and gradients, 32-bit master weights and Adam, P parameters on N ranks, this is 16P, 4P + 12P/N,
2P + 14P/N and 16P/N bytes at stages 0 to 3, up to padding (Rajbhandari et al., "ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models", 2020, section 3.1 and figure 1).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from partita.plan.mesh_shape import MeshShape
from partita.plan.planned import PlannedSegment, PlannedUnit
from partita.plan.residence import Residence, Tier
from partita.plan.steps import steps

ADAM_MOMENTS = 2


def model_state_bytes(
    units: Sequence[PlannedUnit], mesh: MeshShape, rank: int | None, num_moments: int = ADAM_MOMENTS
) -> dict[tuple[str, str], int]:
    """Bytes that ``rank`` holds for each state, by (state, tier), once every parameter that trains has been updated.

    Without a ``rank``: the most that any of them may hold, so that what follows from it is the same on all.


    The states are ``parameters``, ``gradients``, ``master`` (only where it has memory of its own) and ``moments``, of
    which the optimizer keeps ``num_moments`` for each element. Padding is included. Gradients that rest nowhere else
    are counted where autograd leaves them, as large as their parameters, from backward to the step.
    """
    held = Counter[tuple[str, str]]()
    for unit in units:
        for segment in unit.segments:
            for state, residence, num_bytes in _states(segment, mesh, rank, num_moments):
                held[state, residence.tier.value] += num_bytes
    return {key: num_bytes for key, num_bytes in held.items() if num_bytes}


def _states(
    segment: PlannedSegment, mesh: MeshShape, rank: int | None, num_moments: int
) -> Iterator[tuple[str, Residence, int]]:
    """(state, residence, bytes) for everything that a segment keeps."""
    row, padded = segment.row, segment.layout.padded
    yield "parameters", row.param_rest, row.param_rest.num_bytes(padded, mesh)
    if segment.has_second(mesh):
        yield "parameters", row.param_between, row.param_between.num_bytes(padded, mesh)
    if not segment.trains:
        return
    if not row.gradients_rest:
        pass  # a few of them are in working memory at a time
    elif steps(row.grad_arrival, row.grad_step, mesh):
        yield "gradients", row.grad_between, row.grad_between.num_bytes(padded, mesh)
    else:
        yield "gradients", row.grad_arrival, _value_bytes(segment, row.grad_arrival, mesh, rank)
    if segment.has_own_master(mesh):
        yield "master", row.master, row.master.num_bytes(padded, mesh)
    if row.moments.tier is Tier.DISK:  # there they are kept as the shard is, with its padding
        yield "moments", row.moments, num_moments * row.moments.num_bytes(padded, mesh)
    else:
        yield "moments", row.moments, num_moments * _value_bytes(segment, row.moments, mesh, rank)


def _value_bytes(segment: PlannedSegment, residence: Residence, mesh: MeshShape, rank: int | None) -> int:
    """Bytes of the values themselves, without padding, that ``rank`` holds under ``residence``."""
    if rank is None:
        return residence.num_bytes(segment.layout.padded, mesh)
    spans = segment.spans_of(residence, mesh, rank)
    return sum(residence.encoding.num_bytes(span.num_elements) for span in spans)
