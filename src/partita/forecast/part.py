"""What a rank of a pipeline has of activations at its most: its part of the model under an order of work."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from partita.parallel.pipeline.schedule import Action, Work


@dataclass(frozen=True)
class Part:
    """Bytes of one micro-batch's forward and backward through some blocks in a row.

    ``kept_bytes`` stay from forward to backward; the peaks are with these, and above all else. ``growing_peak`` is that
    of a backward some of whose gradients, of ``gradient_bytes``, stay where autograd leaves them. ``left_bytes`` stay
    from the backward to that of the weights, where this comes later; ``largest_bytes`` is the largest gradient of
    those. ``away``: bytes of inputs that rest elsewhere while it runs, and after its forward.
    """

    forward_peak: int
    kept_bytes: int
    backward_peak: int
    growing_peak: int
    gradient_bytes: int
    left_bytes: int = 0
    largest_bytes: int = 0
    away: tuple[int, int] = (0, 0)

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
    micro-batches whose forwards are ``kept``, and whose backwards have ``left`` gradients of weights; of those that
    have ``begun``, gradients were computed before. ``splits``: weights' gradients are computed apart.
    """

    work: Work
    chunk: int
    kept: tuple[int, ...]
    left: tuple[int, ...]
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
        else:
            peak = max(part.weights_peak, part.gradient_bytes if first else 0)
        for each, kept, left, begun in zip(parts, self.kept, self.left, self.begun, strict=True):
            peak += kept * each.kept_bytes + left * each.left_bytes + begun * each.gradient_bytes
        return peak


def moments(order: Sequence[Action], num_chunks: int) -> frozenset[Moment]:
    """Those of a rank that does its work in this ``order``; alike ones are one."""
    splits = any(action.work is Work.WEIGHTS for action in order)
    kept, left, begun = [0] * num_chunks, [0] * num_chunks, [False] * num_chunks
    found = set[Moment]()
    for action in order:
        kept[action.chunk] -= action.work is Work.BACKWARD
        left[action.chunk] -= action.work is Work.WEIGHTS
        found.add(Moment(action.work, action.chunk, tuple(kept), tuple(left), tuple(begun), splits))
        kept[action.chunk] += action.work is Work.FORWARD
        if action.work is Work.BACKWARD and splits:
            left[action.chunk] += 1
        elif action.work is not Work.FORWARD:
            begun[action.chunk] = True
    return frozenset(found)


def most_held(found: Iterable[Moment], parts: Sequence[Part]) -> int:
    """Bytes at the most of these moments. Gradients that stay are counted elsewhere: it is what is there beside all of
    them. While activations are at their most, they may only have begun to come.
    """
    return max(0, max(moment.held(parts) for moment in found) - sum(part.gradient_bytes for part in parts))
