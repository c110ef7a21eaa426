"""What a rank of a pipeline has of activations at its most: its part of the model under an order of work."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from partita.parallel.pipeline.run import gradients_before
from partita.parallel.pipeline.schedule import Schedule, Shape, Work


@dataclass(frozen=True)
class Part:
    """Bytes of one micro-batch's forward and backward through some blocks in a row.

    ``kept_bytes`` stay from forward to backward; the peaks are with these, and above all else. ``growing_peak`` is that
    of a backward some of whose gradients, of ``gradient_bytes``, stay where autograd leaves them. ``left_bytes`` stay
    from the backward to that of the weights, where this comes later; ``largest_bytes`` is the largest gradient of
    those; ``sent_bytes``: of the gradient that goes back to the stage before. ``away``: bytes of inputs that rest
    elsewhere while it runs, and after its forward; ``staying_bytes``: of those that have not left when it ends, and do
    so in the next forward.
    """

    forward_peak: int
    kept_bytes: int
    backward_peak: int
    growing_peak: int
    gradient_bytes: int
    left_bytes: int = 0
    largest_bytes: int = 0
    sent_bytes: int = 0
    away: tuple[int, int] = (0, 0)
    staying_bytes: int = 0

    @property
    def peak(self) -> int:
        return max(self.forward_peak, self.backward_peak)

    @property
    def weights_peak(self) -> int:
        """While the weights' gradients are computed, each of which goes where gradients rest."""
        return self.left_bytes + self.largest_bytes

    @property
    def resting_elsewhere(self) -> "Part":
        """The same of the inputs that rest elsewhere."""
        most, kept = self.away
        return Part(most, kept, most, most, 0)


@dataclass(frozen=True)
class Moment:
    """A rank does this ``work`` of one of its chunks, for a micro-batch. Beside it there are, of each chunk, so many
    micro-batches whose forwards are ``kept``, whose backwards have ``left`` gradients of weights, and of which
    gradients are under way to the stage before (``sent``); of chunks that have ``begun``, gradients were computed
    before. ``splits``: weights' gradients are computed apart.
    """

    work: Work
    chunk: int
    kept: tuple[int, ...]
    left: tuple[int, ...]
    sent: tuple[int, ...]
    begun: tuple[bool, ...]
    splits: bool

    def held(self, parts: Sequence[Part]) -> int:
        """Bytes at its most, of the chunks' ``parts``."""
        part = parts[self.chunk]
        first = not self.begun[self.chunk]
        if self.work is Work.FORWARD:
            peak = part.forward_peak
        elif self.work is Work.BACKWARD:
            peak = part.growing_peak if first and not self.splits else part.backward_peak
            peak += part.staying_bytes if any(self.kept) else 0  # of the last forward, which was another micro-batch's
        else:
            peak = max(part.weights_peak, part.gradient_bytes if first else 0)
        for each, kept, left, sent, begun in zip(parts, self.kept, self.left, self.sent, self.begun, strict=True):
            peak += kept * each.kept_bytes + left * each.left_bytes + sent * each.sent_bytes
            peak += begun * each.gradient_bytes
        return peak


def representative(name: str, shape: Shape) -> Shape:
    """A shape of no more micro-batches whose ranks, under the schedule of this ``name``, have the same :func:`moments`:
    after two rounds of as many as there are ranks nothing is new in the third, where forwards do not run ahead of all
    backwards.
    """
    most = 3 * shape.ranks
    repeats = name in ("1f1b", "interleaved") and shape.micros % shape.ranks == 0
    return replace(shape, micros=most) if repeats and shape.micros > most else shape


def moments(schedule: Schedule, rank: int) -> frozenset[Moment]:
    """Those of a rank of the pipeline; alike ones are one."""
    shape, splits, last_work = schedule.shape, schedule.splits_weights, schedule.last_work
    stages = [shape.stage(rank, chunk) for chunk in range(shape.chunks)]
    arrived = dict(gradients_before(schedule, stages))
    kept, left, backwards, waited = ([0] * shape.chunks for _ in range(4))
    begun, found = [False] * shape.chunks, set[Moment]()
    for action in schedule.orders[rank]:
        chunk, work = action.chunk, action.work
        if work is Work.FORWARD:
            waited[chunk] = max(waited[chunk], arrived.get(action, 0))
        kept[chunk] -= work is Work.BACKWARD
        left[chunk] -= work is Work.WEIGHTS
        sent = tuple((done - gone) * (at > 0) for done, gone, at in zip(backwards, waited, stages, strict=True))
        found.add(Moment(work, chunk, tuple(kept), tuple(left), sent, tuple(begun), splits))
        kept[chunk] += work is Work.FORWARD
        backwards[chunk] += work is Work.BACKWARD
        left[chunk] += splits and work is Work.BACKWARD
        begun[chunk] |= work is last_work
    return frozenset(found)


def most_held(found: Iterable[Moment], parts: Sequence[Part]) -> int:
    """Bytes at the most of these moments. Gradients that stay are counted elsewhere: it is what is there beside all of
    them. While activations are at their most, they may only have begun to come.
    """
    return max(0, max(moment.held(parts) for moment in found) - sum(part.gradient_bytes for part in parts))
