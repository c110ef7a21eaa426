"""What a forward and a backward keep, compute and send, block by block."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import Any

from partita.activation.inputs import NUM_STAYING
from partita.forecast.part import Part
from partita.forecast.peak import NO_PEAK, NOTHING, Peak, Size
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

    What is ``kept`` stays from its forward to its backward, its output among it; the peaks are above what was there
    when its forward began, and above what all forwards up to its own have kept and what later backwards have left.
    ``input_bytes``: of what it is given that was computed before it, and for it alone; ``consumed``: that, where it is
    gone once the block has run (norms save what they have cast to fp32), and so taken off what is ``kept``;
    ``received_bytes``: of all that it is given that depends on parameters, which another stage of a pipeline sends, and
    which stays there.

    ``gradients``: bytes of those that its backward gives parameters, by name; ``growing_peak`` is that of its backward
    if these stay where autograd leaves them. ``left_bytes``: what its backward leaves for that of the weights, where
    this comes later. ``ended_bytes``: how much more its backward's peak is where its output and the
    gradient of that stay to the end, as in the last block of a stage.
    """

    kept: Size = NOTHING
    forward_peak: Peak = NO_PEAK
    backward_peak: Peak = NO_PEAK
    received_bytes: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    gradients: Mapping[str, int] = field(default_factory=dict)
    growing_peak: Peak = NO_PEAK
    input_bytes: int = 0
    left_bytes: int = 0
    ended_bytes: int = 0
    consumed: Size = NOTHING

    def growth(self, staying: Set[str]) -> tuple[int, int]:
        """Bytes of the gradients that stay where autograd leaves them, by name, and the backward's peak with them."""
        stay = sum(num for name, num in self.gradients.items() if name in staying)
        gone = sum(self.gradients.values()) - stay
        return stay, max(self.backward_peak.num_bytes, self.growing_peak.num_bytes - gone)


@dataclass(frozen=True)
class Trace:
    """``names`` are all blocks, in order, ``blocks`` what is of each (alike ones have the same). ``before`` and
    ``after`` run around them: embeddings; output layer and loss, whose backward counts in ``after.forward``.
    ``inputs_rest``: where the inputs of blocks that run again are between forward and backward
    (:mod:`partita.activation.inputs`). ``around``: what of the inputs alone is computed before all blocks, and
    stays; every stage of a pipeline does so. ``batch_bytes``: of what the forward is given. ``samples``:
    how many these are, where it says of each size whether it comes with them.
    """

    before: Piece
    names: tuple[str, ...]
    blocks: tuple[Piece, ...]
    after: Piece
    inputs_rest: Tier = Tier.DEVICE
    around: Size = NOTHING
    batch_bytes: int = 0
    samples: int = 1

    @property
    def peak(self) -> int:
        """Bytes of activations on the device at their most, of one micro-batch of the whole model."""
        return self.part(0, len(self.blocks)).peak

    def part(self, start: int, stop: int, waiting: Sequence[int] = (), staying: Set[str] = frozenset()) -> Part:
        """What a forward and a backward of the blocks ``[start, stop)`` take, with what runs before the first and after
        the last if it is among them.

        Args:
            waiting: bytes of gradients that are with their parameters still while the backward runs of what is before
                the blocks, and of each of them.
            staying: names of parameters whose gradients stay where autograd leaves them.
        """
        first, last = start == 0, stop == len(self.blocks)
        blocks, before, after = self.blocks[start:stop], self.before, self.after
        num, waits = len(blocks), [*waiting] or [0] * (1 + len(blocks))
        gone, left, grown = self._gone(start, stop), 0, 0
        ahead = (
            before.kept.num_bytes
            if first
            else self.around.num_bytes + sum(piece.received_bytes for piece in blocks[:1])
        )
        kept = [piece.kept.num_bytes for piece in blocks]
        if kept and not first:
            kept[0] += blocks[0].consumed.num_bytes
        below = list(accumulate(kept, initial=ahead))
        most = below[-1] - gone(num - STAYING)
        # What a stage sends and the gradient of that are there until its backward is done.
        sent = 0 if last else self.blocks[stop].received_bytes
        forward = [
            before.forward_peak.num_bytes if first else ahead,
            most + after.forward_peak.num_bytes if last else 0,
        ]
        forward += [below[at] - gone(at - STAYING) + piece.forward_peak.num_bytes for at, piece in enumerate(blocks)]
        backward = growing = most + sent
        # Each piece with what is there beside it when its backward begins.
        walk = [(before, waits[0] + 2 * sent)] * first
        for at, piece in enumerate(blocks):
            ended = 2 * sent if at < num - 1 or last else piece.ended_bytes
            walk.append((piece, below[at + 1] - gone(min(at - 1, num - STAYING)) + waits[at + 1] + ended))
        walk += [(after, most)] * last
        for piece, there in reversed(walk):
            own = there + left
            stay, growing_peak = piece.growth(staying)
            backward = max(backward, own + piece.backward_peak.num_bytes)
            growing = max(growing, own + growing_peak + grown)
            grown, left = grown + stay, left + piece.left_bytes
        stays = below[-1] - gone(num) + (after.kept.num_bytes if last else 0)
        back = 0 if first else blocks[0].received_bytes
        away, here = (gone(num - NUM_STAYING), gone(num)), gone(num) - gone(num - STAYING)
        return Part(max(forward), stays, backward, growing, grown, left, 0, back, away, here)

    def _gone(self, start: int, stop: int) -> Callable[[int], int]:
        """Bytes of the inputs of so many blocks, where they rest elsewhere."""
        sums = list(accumulate((piece.input_bytes for piece in self.blocks[start:stop]), initial=0))
        rests_here = self.inputs_rest is Tier.DEVICE
        return lambda num: 0 if rests_here else sums[max(0, num)]

    def of(self, samples: int) -> "Trace":
        """What it says of so many samples."""
        made, factor = dict[int, Piece](), Fraction(samples, self.samples)

        def times(piece: Piece) -> Piece:
            if id(piece) not in made:
                sizes: dict[str, Any] = {name: ceil(getattr(piece, name) * factor) for name in _SIZES}
                sizes |= {name: getattr(piece, name).scaled(factor) for name in _SCALED}
                forward, backward = _times(piece.forward, factor), _times(piece.backward, factor)
                made[id(piece)] = replace(piece, forward=forward, backward=backward, **sizes)
            return made[id(piece)]

        return replace(
            self,
            before=times(self.before),
            blocks=tuple(map(times, self.blocks)),
            after=times(self.after),
            around=self.around.scaled(factor),
            batch_bytes=ceil(self.batch_bytes * factor),
            samples=samples,
        )


# Of a piece, what there is for each sample.
_SIZES = ("received_bytes", "input_bytes", "left_bytes", "ended_bytes")
_SCALED = ("kept", "consumed", "forward_peak", "backward_peak", "growing_peak")


def _times(work: Work, factor: Fraction) -> Work:
    flops, moved = ceil(work.flops * factor), ceil(work.moved_bytes * factor)
    sent = Counter({axis: ceil(num * factor) for axis, num in work.sent.items()})
    jobs = Counter[tuple[str, int]]()
    for (kind, size), num in work.jobs.items():
        jobs[kind, ceil(size * factor)] += num
    return Work(flops, moved, work.num_ops, jobs, sent, work.calls)
