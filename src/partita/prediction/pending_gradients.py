"""Gradients that stay in ``param.grad`` until their bucket is reduced.

Buckets are reduced in the order of the units, the last unit first. Gradients of parameters outside the blocks arrive in
another order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partita.prediction.chunk_activations import ChunkBytes
from partita.prediction.stages import Stage
from partita.prediction.trace.block_trace import Trace
from partita.table.place import Place
from partita.table.planned import PlannedSegment, PlannedUnit, reduction_order
from partita.table.planned_bucket import share_buckets
from partita.table.span import Entry


@dataclass(frozen=True)
class PendingGradients:
    """The gradients of a stage before they are moved to gradient storage.

    ``in_place``: names of parameters whose gradients stay in ``param.grad``. ``pending``: bytes that wait for their
    bucket, for each chunk, from :func:`pending_bytes`. ``largest_bytes``: bytes of the largest gradient.
    """

    in_place: frozenset[str]
    pending: tuple[tuple[int, ...], ...]
    largest_bytes: int


def pending_gradients(stage: Stage, units: Sequence[PlannedUnit], trace: Trace) -> PendingGradients:
    """Return the gradients of a stage that has these units."""
    in_place, largest = set[str](), 0
    for entries, unit in zip(stage.entries, units, strict=True):
        is_in_place = [segment.gradients.in_place for segment in unit.segments]
        for entry, segment in zip(entries, segments_of(entries), strict=True):
            if entry.trainable:
                largest = max(largest, _gradient_bytes(entry))
                if is_in_place[segment]:
                    in_place.add(entry.fqn)
    pending = tuple(pending_bytes(stage, chunk, units, trace) for chunk in range(len(stage.chunks)))
    return PendingGradients(frozenset(in_place), pending, largest)


def bytes_per_chunk(stage: Stage, gradients: PendingGradients, trace: Trace) -> list[ChunkBytes]:
    """Return the activation bytes of each of a stage's chunks, including gradients that wait for their bucket."""
    found = list[ChunkBytes]()
    for (start, stop), pending in zip(stage.chunks, gradients.pending, strict=True):
        chunk_bytes = trace.chunk_bytes(start, stop, pending, gradients.in_place)
        # Gradients of the epilogue are pending once its deferred memory is used up.
        waits = max(0, max(pending) - (trace.epilogue.deferred_bytes if stop == len(trace.blocks) else 0))
        found.append(replace(chunk_bytes, largest_bytes=gradients.largest_bytes + waits))
    return found


# (number of a bucket, bytes of a gradient in it).
Arrival = tuple[int, int]


def pending_bytes(stage: Stage, chunk: int, units: Sequence[PlannedUnit], trace: Trace) -> tuple[int, ...]:
    """Return the bytes of gradients that are still in ``param.grad`` at the start of each backward.

    The first value is for the backward of the prologue, the others are for those of the chunk's blocks.
    """
    start, stop = stage.chunks[chunk]
    if not any(segment.gradients.is_pooled for unit in units for segment in unit.segments if segment.trains):
        return (0,) * (1 + stop - start)
    numbers, num_buckets = _bucket_numbers(units), len(share_buckets(reduction_order(units)))
    first, last = start - (start == 0), stop - (stop < len(trace.blocks))
    arrivals: dict[int, list[Arrival]] = {}
    missing: dict[int, int] = {}  # number of gradients that a bucket waits for
    for at in range(len(units)):
        for place, arrival in _arrivals(stage, at, units[at], numbers[at], trace):
            missing[arrival[0]] = missing.get(arrival[0], 0) + 1
            if first <= place <= last:
                arrivals.setdefault(place, []).append(arrival)
    pending, found = dict[int, int](), list[int]()
    turn = 0
    for place in range(stop, start - 2, -1):
        found.append(sum(pending.values()))
        for bucket, num_bytes in arrivals.get(place, ()):
            if bucket != turn:
                pending[bucket] = pending.get(bucket, 0) + num_bytes
            missing[bucket] -= 1
            while turn < num_buckets and not missing.get(turn):
                pending.pop(turn, None)
                turn += 1
    return tuple(reversed(found[1:]))


def _bucket_numbers(units: Sequence[PlannedUnit]) -> list[list[int | None]]:
    """Return the bucket number of each segment of each unit; None: the segment does not train."""
    order: list[PlannedSegment] = reduction_order(units)
    numbers = iter([number for number, bucket in enumerate(share_buckets(order)) for _ in bucket.segments])
    found: list[list[int | None]] = [
        [next(numbers) if segment.trains else None for segment in unit.segments] for unit in reversed(units)
    ]
    return found[::-1]


def _arrivals(
    stage: Stage, at: int, unit: PlannedUnit, numbers: Sequence[int | None], trace: Trace
) -> Iterator[tuple[int, Arrival]]:
    """Yield, for each pending gradient of a unit, the block that computes it, its bucket and its bytes.

    The number of blocks stands for the epilogue, -1 for the prologue.
    """
    waits = [segment.gradients.is_pooled for segment in unit.segments]
    has_last = any(stop == len(trace.blocks) for _, stop in stage.chunks)
    for entry, segment in zip(stage.entries[at], segments_of(stage.entries[at]), strict=True):
        number, place = numbers[segment], stage.block_numbers[at]
        if number is not None and waits[segment]:
            if place is None:
                place = len(trace.blocks) if has_last and entry.fqn in trace.epilogue.gradients else -1
            yield place, (number, _gradient_bytes(entry))


def segments_of(entries: Sequence[Entry]) -> list[int]:
    """Return the segment number of each parameter of a unit."""
    numbers = dict[object, int]()
    return [numbers.setdefault(entry.kind, len(numbers)) for entry in entries]


def _gradient_bytes(entry: Entry) -> int:
    place = entry.place or Place(entry.shape)
    return place.num_elements * entry.encoding.itemsize
