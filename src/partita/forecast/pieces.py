"""What a forward and a backward keep, compute and send, block by block."""

from collections import Counter
from dataclasses import dataclass, field


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
    these stay where autograd leaves them.
    """

    kept_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    output_bytes: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    gradient_bytes: int = 0
    growing_peak: int = 0


@dataclass(frozen=True)
class Trace:
    """``names`` are all blocks, in order, ``blocks`` what is of each (alike ones have the same). ``before`` and
    ``after`` run around them: embeddings; output layer and loss, whose backward counts as ``after.backward`` and whose
    ``forward_peak`` is of both.
    """

    before: Piece
    names: tuple[str, ...]
    blocks: tuple[Piece, ...]
    after: Piece

    def peak(self, start: int = 0, stop: int | None = None, kept_forwards: int = 1) -> int:
        """Bytes of activations at their most, of the blocks ``[start, stop)``, with what runs before the first and
        after the last if it is among them.

        Args:
            kept_forwards: micro-batches whose forwards are kept at once.
        """
        stop = len(self.blocks) if stop is None else stop
        live = self.before.kept_bytes if start == 0 else 0
        most = self.before.forward_peak if start == 0 else 0
        kept = [live]
        for piece in self.blocks[start:stop]:
            most = max(most, live + piece.forward_peak)
            live += piece.kept_bytes
            kept.append(live)
        if stop == len(self.blocks):
            most = max(most, live + self.after.forward_peak)
        for piece, below in zip(reversed(self.blocks[start:stop]), reversed(kept), strict=False):
            most = max(most, below + piece.backward_peak)
        if start == 0:
            most = max(most, self.before.backward_peak)
        return most + (kept_forwards - 1) * live

    def growing_peak(self, start: int = 0, stop: int | None = None) -> int:
        """The same of one micro-batch whose gradients stay where autograd leaves them, less these: what is there beside
        all of them. While activations are at their most, they have only begun to come.
        """
        stop = len(self.blocks) if stop is None else stop
        most, grown = self.peak(start, stop), 0
        below = [self.before.kept_bytes if start == 0 else 0]
        for piece in self.blocks[start:stop]:
            below.append(below[-1] + piece.kept_bytes)
        if stop == len(self.blocks):
            most, grown = max(most, below[-1] + self.after.growing_peak), self.after.gradient_bytes
        for piece, kept in zip(reversed(self.blocks[start:stop]), reversed(below), strict=False):
            most = max(most, kept + piece.growing_peak + grown)
            grown += piece.gradient_bytes
        if start == 0:
            most = max(most, self.before.growing_peak + grown)
            grown += self.before.gradient_bytes
        return max(0, most - grown)

    def scaled(self, factor: float) -> "Trace":
        """As many samples more, or fewer: what a trace of one of them says of several."""
        made = dict[int, Piece]()

        def times(piece: Piece) -> Piece:
            if id(piece) not in made:
                sizes = (piece.kept_bytes, piece.forward_peak, piece.backward_peak, piece.output_bytes)
                kept, forward, backward, output = (int(size * factor) for size in sizes)
                work = _times(piece.forward, factor), _times(piece.backward, factor)
                made[id(piece)] = Piece(kept, forward, backward, output, *work)
            return made[id(piece)]

        return Trace(times(self.before), self.names, tuple(map(times, self.blocks)), times(self.after))


def _times(work: Work, factor: float) -> Work:
    flops, moved = int(work.flops * factor), int(work.moved_bytes * factor)
    sent = Counter({axis: int(num * factor) for axis, num in work.sent.items()})
    jobs = Counter[tuple[str, int]]()
    for (kind, size), num in work.jobs.items():
        jobs[kind, int(size * factor)] += num
    return Work(flops, moved, work.num_ops, jobs, sent, work.calls)
