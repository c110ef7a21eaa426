"""Peak activation bytes of a pipeline rank under a schedule."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from partita.parallel.pipeline.run import gradients_before
from partita.parallel.pipeline.schedule import Schedule, Shape, Work


@dataclass(frozen=True, kw_only=True)
class ChunkBytes:
    """Activation bytes of one micro-batch's forward and backward through consecutive blocks.

    ``kept_bytes`` stay from forward to backward. Peaks include them, and exclude all memory of other blocks.
    ``in_place_peak``: the backward's peak if some of its gradients, of ``gradient_bytes``, stay in ``param.grad``. If
    weight gradients are deferred, ``deferred_bytes`` stay until these are computed, and ``largest_bytes`` is the
    largest of these gradients. ``sent_bytes``: the gradient that is sent to the previous stage. ``offloaded_bytes``:
    bytes of offloaded inputs, while the blocks run and after their forward. ``unfinished_offload_bytes``: inputs whose
    copy to their tier ends during the next forward.
    """

    forward_peak: int
    kept_bytes: int
    backward_peak: int
    in_place_peak: int
    gradient_bytes: int
    deferred_bytes: int = 0
    largest_bytes: int = 0
    sent_bytes: int = 0
    offloaded_bytes: tuple[int, int] = (0, 0)
    unfinished_offload_bytes: int = 0

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def weights_peak(self) -> int:
        """Peak bytes while deferred weight gradients are computed.

        Each is moved to gradient storage when it is complete.
        """
        return self.deferred_bytes + self.largest_bytes

    @property
    def offloaded_inputs(self) -> "ChunkBytes":
        """The bytes of the offloaded inputs alone, in their tier."""
        most, kept = self.offloaded_bytes
        return ChunkBytes(forward_peak=most, kept_bytes=kept, backward_peak=most, in_place_peak=most, gradient_bytes=0)


@dataclass(frozen=True)
class ScheduleState:
    """One state of a pipeline rank: it runs ``work`` of a chunk for a micro-batch, and keeps memory of other ones.

    For each chunk, ``kept`` counts the micro-batches between forward and backward, ``deferred`` those with deferred
    weight gradients, and ``sent`` those whose gradients are being sent to the previous stage. ``begun``: True for
    chunks with gradients of earlier micro-batches. ``splits``: weight gradients are deferred.
    """

    work: Work
    chunk: int
    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    sent: tuple[int, ...]
    begun: tuple[bool, ...]
    splits: bool

    def peak_bytes(self, per_chunk: Sequence[ChunkBytes]) -> int:
        """Return the peak bytes of this state, given the activation bytes of each of the rank's chunks."""
        chunk_bytes = per_chunk[self.chunk]
        first = not self.begun[self.chunk]
        if self.work is Work.FORWARD:
            peak = chunk_bytes.forward_peak
        elif self.work is Work.BACKWARD:
            peak = chunk_bytes.in_place_peak if first and not self.splits else chunk_bytes.backward_peak
            peak += (
                chunk_bytes.unfinished_offload_bytes if any(self.kept) else 0
            )  # of the last forward, of another micro-batch
        else:
            peak = max(chunk_bytes.weights_peak, chunk_bytes.gradient_bytes if first else 0)
        for each, kept, deferred, sent, begun in zip(
            per_chunk, self.kept, self.deferred, self.sent, self.begun, strict=True
        ):
            peak += kept * each.kept_bytes + deferred * each.deferred_bytes + sent * each.sent_bytes
            peak += begun * each.gradient_bytes
        return peak


def representative(name: str, shape: Shape) -> Shape:
    """Return a shape with fewer micro-batches, if there is one whose ranks have the same :func:`schedule_states`.

    A round has as many micro-batches as there are ranks. In the schedules ``1f1b`` and ``interleaved``, the number of
    micro-batches between forward and backward is bounded, so rounds after the second add no new states.
    """
    most = 3 * shape.ranks
    repeats = name in ("1f1b", "interleaved") and shape.micros % shape.ranks == 0
    return replace(shape, micros=most) if repeats and shape.micros > most else shape


def schedule_states(schedule: Schedule, rank: int) -> frozenset[ScheduleState]:
    """Return the distinct states of one rank of the pipeline."""
    shape, splits, last_work = schedule.shape, schedule.splits_weights, schedule.last_work
    stages = [shape.stage(rank, chunk) for chunk in range(shape.chunks)]
    arrived = dict(gradients_before(schedule, stages))
    kept, deferred, backwards, waited = ([0] * shape.chunks for _ in range(4))
    begun, found = [False] * shape.chunks, set[ScheduleState]()
    for action in schedule.orders[rank]:
        chunk, work = action.chunk, action.work
        if work is Work.FORWARD:
            waited[chunk] = max(waited[chunk], arrived.get(action, 0))
        kept[chunk] -= work is Work.BACKWARD
        deferred[chunk] -= work is Work.WEIGHTS
        sent = tuple((done - awaited) * (at > 0) for done, awaited, at in zip(backwards, waited, stages, strict=True))
        found.add(ScheduleState(work, chunk, tuple(kept), tuple(deferred), sent, tuple(begun), splits))
        kept[chunk] += work is Work.FORWARD
        backwards[chunk] += work is Work.BACKWARD
        deferred[chunk] += splits and work is Work.BACKWARD
        begun[chunk] |= work is last_work
    return frozenset(found)


def peak_bytes(found: Iterable[ScheduleState], per_chunk: Sequence[ChunkBytes]) -> int:
    """Return the peak bytes over these states, without the gradients that stay in ``param.grad``.

    All of these gradients are counted with the model states. All of them are subtracted here, although only some may
    exist when activations peak.
    """
    return max(
        0,
        max(state.peak_bytes(per_chunk) for state in found)
        - sum(chunk_bytes.gradient_bytes for chunk_bytes in per_chunk),
    )
