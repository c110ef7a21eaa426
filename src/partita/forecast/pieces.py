"""What a forward and a backward keep, compute and send, block by block."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from partita.activation.inputs import NUM_STAYING
from partita.plan.residence import Tier

# Inputs of blocks that are still on the device beside that of the one which runs, of those that leave it: one leaves
# while the next block but one runs.
STAYING = NUM_STAYING + 1


@dataclass
class Work:
    """``flops`` of matrix products; ``moved_bytes`` that all other operators read and write. ``jobs``: how many
    operators of each (kind, size), as :class:`~partita.planner.machine.Machine` measures them. ``sent``: bytes to other
    ranks by axis, in so many ``calls``, while the caller waits.
    """

    flops: int = 0
    moved_bytes: int = 0
    num_ops: int = 0
    jobs: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def sent_bytes(self) -> int:
        """Along all axes."""
        return self.sent.total()


@dataclass
class Piece:
    """Of a block, or of what runs before or after all blocks.

    ``kept_bytes`` stay from its forward to its backward, its output among them; the peaks are above what was there when
    its forward began, and above what all forwards up to its own have kept. ``output_bytes``: of what it returns.
    ``gradient_bytes``: of parameters that its backward gives gradients to; ``growing_peak`` is that of its backward if
    these stay where autograd leaves them. ``input_bytes``: of what it is given that was computed before it, and for it
    alone.
    """

    kept_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    output_bytes: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    gradient_bytes: int = 0
    growing_peak: int = 0
    input_bytes: int = 0


@dataclass(frozen=True)
class Trace:
    """``names`` are all blocks, in order, ``blocks`` what is of each (alike ones have the same). ``before`` and
    ``after`` run around them: embeddings; output layer and loss, whose backward counts as ``after.backward`` and whose
    ``forward_peak`` is of both. ``inputs_rest``: where the inputs of blocks that run again are between forward and
    backward (:mod:`partita.activation.inputs`).
    """

    before: Piece
    names: tuple[str, ...]
    blocks: tuple[Piece, ...]
    after: Piece
    inputs_rest: Tier = Tier.DEVICE

    def peak(self, start: int = 0, stop: int | None = None, kept_forwards: int = 1) -> int:
        """Bytes of activations on the device at their most, of the blocks ``[start, stop)``, with what runs before the
        first and after the last if it is among them.

        Args:
            kept_forwards: micro-batches whose forwards are kept at once.
        """
        below, gone = self._below(start, stop), self._gone(start, stop)
        blocks, num = self.blocks[start:stop], len(below) - 1
        most = self.before.forward_peak if start == 0 else 0
        for at, piece in enumerate(blocks):
            most = max(most, below[at] - gone(at - STAYING) + piece.forward_peak)
        if stop is None or stop == len(self.blocks):
            most = max(most, below[-1] - gone(num - STAYING) + self.after.forward_peak)
        for at, piece in enumerate(blocks):
            most = max(most, below[at + 1] - gone(min(at - 1, num - STAYING)) + piece.backward_peak)
        if start == 0:
            most = max(most, self.before.backward_peak)
        return most + (kept_forwards - 1) * (below[-1] - gone(num))

    def growing_peak(self, start: int = 0, stop: int | None = None) -> int:
        """The same of one micro-batch whose gradients stay where autograd leaves them, less these: what is there beside
        all of them. While activations are at their most, they have only begun to come.
        """
        below, gone = self._below(start, stop), self._gone(start, stop)
        blocks, num = self.blocks[start:stop], len(below) - 1
        most, grown = self.peak(start, stop), 0
        if stop is None or stop == len(self.blocks):
            most = max(most, below[-1] - gone(num - STAYING) + self.after.growing_peak)
            grown = self.after.gradient_bytes
        for at, piece in reversed(list(enumerate(blocks))):
            most = max(most, below[at + 1] - gone(min(at - 1, num - STAYING)) + piece.growing_peak + grown)
            grown += piece.gradient_bytes
        if start == 0:
            most = max(most, self.before.growing_peak + grown)
            grown += self.before.gradient_bytes
        return max(0, most - grown)

    def away(self, start: int = 0, stop: int | None = None, kept_forwards: int = 1) -> int:
        """Bytes of inputs that rest elsewhere, at their most; arguments as :meth:`peak` takes them."""
        gone, num = self._gone(start, stop), len(self.blocks[start:stop])
        return (kept_forwards - 1) * gone(num) + gone(num - NUM_STAYING)

    def _below(self, start: int, stop: int | None) -> list[int]:
        """What is kept when each block's forward begins, and at the end."""
        first = self.before.kept_bytes if start == 0 else 0
        return list(accumulate((piece.kept_bytes for piece in self.blocks[start:stop]), initial=first))

    def _gone(self, start: int, stop: int | None) -> Callable[[int], int]:
        """Bytes of the inputs of so many blocks, where they rest elsewhere. That of a later stage's first block comes
        from another rank, and is in nothing that is kept.
        """
        inputs = [piece.input_bytes for piece in self.blocks[start:stop]]
        if start > 0:
            inputs[:1] = [0]
        sums = list(accumulate(inputs, initial=0))
        rests_here = self.inputs_rest is Tier.DEVICE
        return lambda num: 0 if rests_here else sums[max(0, num)]

    def scaled(self, factor: float) -> "Trace":
        """As many samples more, or fewer: what a trace of one of them says of several."""
        made = dict[int, Piece]()

        def times(piece: Piece) -> Piece:
            if id(piece) not in made:
                sizes = (piece.kept_bytes, piece.forward_peak, piece.backward_peak, piece.output_bytes)
                kept, forward, backward, output = (int(size * factor) for size in sizes)
                work = _times(piece.forward, factor), _times(piece.backward, factor)
                made[id(piece)] = Piece(kept, forward, backward, output, *work)
                made[id(piece)].input_bytes = int(piece.input_bytes * factor)
            return made[id(piece)]

        blocks = tuple(map(times, self.blocks))
        return Trace(times(self.before), self.names, blocks, times(self.after), self.inputs_rest)


def _times(work: Work, factor: float) -> Work:
    flops, moved = int(work.flops * factor), int(work.moved_bytes * factor)
    sent = Counter({axis: int(num * factor) for axis, num in work.sent.items()})
    jobs = Counter[tuple[str, int]]()
    for (kind, size), num in work.jobs.items():
        jobs[kind, int(size * factor)] += num
    return Work(flops, moved, work.num_ops, jobs, sent, work.calls)
