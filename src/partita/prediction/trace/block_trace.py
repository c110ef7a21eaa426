"""Memory, computation and communication of a forward and a backward, block by block."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import Any

from partita.activation.inputs import NUM_STAYING
from partita.prediction.chunk_activations import ChunkBytes
from partita.prediction.trace.sizes import NO_PEAK, NOTHING, Peak, Size
from partita.table.residence import Tier

# Number of offloaded inputs still on the device, in addition to that of the running block: the copy of an input ends
# while the second block after its own runs.
NUM_ON_DEVICE = NUM_STAYING + 1


@dataclass
class Work:
    """Operators and messages of a forward or a backward.

    ``flops``: FLOPs of matrix products. ``moved_bytes``: bytes read and written by all other operators. ``jobs``: the
    number of operators of each (kind, size), as :class:`~partita.prediction.machine.Machine` measures them. ``sent``:
    bytes to other ranks by axis, in ``calls`` blocking calls.
    """

    flops: int = 0
    moved_bytes: int = 0
    num_ops: int = 0
    jobs: Counter[tuple[str, int]] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def sent_bytes(self) -> int:
        """Bytes sent along all axes."""
        return self.sent.total()


@dataclass
class BlockTrace:
    """Memory and work of one block, or of the prologue or epilogue.

    ``kept``: memory that stays from forward to backward, including the output. The forward's peak excludes memory that
    existed when the forward began. The backward's peak excludes memory that this forward and all earlier ones have
    kept, and deferred memory of the backwards of later blocks. ``input_bytes``: the input that was computed before this
    block, and is used only by it. ``consumed``: the size of that input if it is freed after the block's forward (norms
    save a copy in fp32 instead); it is subtracted from ``kept``. ``received_bytes``: all inputs that depend on
    parameters. In a pipeline, the previous stage sends them, and they stay in memory.

    ``gradients``: bytes of the parameter gradients that the backward computes, by name. ``in_place_peak``: the
    backward's peak if these stay in ``param.grad``. ``deferred_bytes``: memory that the backward keeps for computing
    weight gradients later, if these are deferred. ``stage_end_bytes``: the growth of the backward's peak if the block's
    output and its gradient stay to the end, as in the last block of a stage.
    """

    kept: Size = NOTHING
    forward_peak: Peak = NO_PEAK
    backward_peak: Peak = NO_PEAK
    received_bytes: int = 0
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    gradients: Mapping[str, int] = field(default_factory=dict)
    in_place_peak: Peak = NO_PEAK
    input_bytes: int = 0
    deferred_bytes: int = 0
    stage_end_bytes: int = 0
    consumed: Size = NOTHING

    def growth(self, in_place: Set[str]) -> tuple[int, int]:
        """Return the bytes of gradients that stay in ``param.grad``, and the backward's peak with them.

        ``in_place`` has the names of these parameters.
        """
        stay = sum(num for name, num in self.gradients.items() if name in in_place)
        moved = sum(self.gradients.values()) - stay
        return stay, max(self.backward_peak.num_bytes, self.in_place_peak.num_bytes - moved)


@dataclass(frozen=True)
class Trace:
    """A forward and a backward: the ``names`` of all blocks in order, and the memory and work of each in ``blocks``.

    Equal blocks share an object. ``prologue`` runs before the first block (embeddings), ``epilogue`` after the last one
    (output layer and loss); the backward of the latter counts in ``epilogue.forward``. ``offload_tier``: the tier of
    the inputs of recomputed blocks between forward and backward (:mod:`partita.activation.inputs`). ``shared_inputs``:
    tensors that are computed before all blocks without parameters, and stay; every stage of a pipeline computes them.
    ``batch_bytes``: the size of the forward's arguments. ``samples``: the number of samples from which :meth:`of`
    scales.
    """

    prologue: BlockTrace
    names: tuple[str, ...]
    blocks: tuple[BlockTrace, ...]
    epilogue: BlockTrace
    offload_tier: Tier = Tier.DEVICE
    shared_inputs: Size = NOTHING
    batch_bytes: int = 0
    samples: int = 1

    @property
    def peak(self) -> int:
        """Peak bytes of activations on the device, of one micro-batch of the full model."""
        return self.chunk_bytes(0, len(self.blocks)).peak

    def chunk_bytes(
        self, start: int, stop: int, pending: Sequence[int] = (), in_place: Set[str] = frozenset()
    ) -> ChunkBytes:
        """Return the bytes of a forward and a backward through the blocks ``[start, stop)``.

        The prologue is included if the first block is; the epilogue if the last one is.

        Args:
            pending: bytes of gradients that are still in ``param.grad``: during the backward of the prologue, and
                during that of each block.
            in_place: names of parameters whose gradients stay in ``param.grad``.
        """
        first, last = start == 0, stop == len(self.blocks)
        blocks, prologue, epilogue = self.blocks[start:stop], self.prologue, self.epilogue
        num, pending_bytes = len(blocks), [*pending] or [0] * (1 + len(blocks))
        offloaded, deferred, grown = self._offloaded_bytes(start, stop), 0, 0
        below_first = (
            prologue.kept.num_bytes
            if first
            else self.shared_inputs.num_bytes + sum(block_trace.received_bytes for block_trace in blocks[:1])
        )
        kept = [block_trace.kept.num_bytes for block_trace in blocks]
        if kept and not first:
            kept[0] += blocks[0].consumed.num_bytes
        below = list(accumulate(kept, initial=below_first))
        most = below[-1] - offloaded(num - NUM_ON_DEVICE)
        # The output that a stage sends, and its gradient, stay until the stage's backward is done.
        sent = 0 if last else self.blocks[stop].received_bytes
        forward = [
            prologue.forward_peak.num_bytes if first else below_first,
            most + epilogue.forward_peak.num_bytes if last else 0,
        ]
        forward += [
            below[at] - offloaded(at - NUM_ON_DEVICE) + block_trace.forward_peak.num_bytes
            for at, block_trace in enumerate(blocks)
        ]
        backward = growing = most + sent
        # Each block, and the bytes of all other tensors when its backward begins.
        walk = [(prologue, pending_bytes[0] + 2 * sent)] * first
        for at, block_trace in enumerate(blocks):
            ended = 2 * sent if at < num - 1 or last else block_trace.stage_end_bytes
            walk.append(
                (
                    block_trace,
                    below[at + 1] - offloaded(min(at - 1, num - NUM_ON_DEVICE)) + pending_bytes[at + 1] + ended,
                )
            )
        walk += [(epilogue, most)] * last
        for block_trace, existing in reversed(walk):
            base = existing + deferred
            stay, in_place_peak = block_trace.growth(in_place)
            backward = max(backward, base + block_trace.backward_peak.num_bytes)
            growing = max(growing, base + in_place_peak + grown)
            grown, deferred = grown + stay, deferred + block_trace.deferred_bytes
        stays = below[-1] - offloaded(num) + (epilogue.kept.num_bytes if last else 0)
        back = 0 if first else blocks[0].received_bytes
        offloaded_bytes, here = (
            (offloaded(num - NUM_STAYING), offloaded(num)),
            offloaded(num) - offloaded(num - NUM_ON_DEVICE),
        )
        return ChunkBytes(max(forward), stays, backward, growing, grown, deferred, 0, back, offloaded_bytes, here)

    def _offloaded_bytes(self, start: int, stop: int) -> Callable[[int], int]:
        """Return a function from a number of blocks to the bytes of their offloaded inputs."""
        sums = list(accumulate((block_trace.input_bytes for block_trace in self.blocks[start:stop]), initial=0))
        stays_on_device = self.offload_tier is Tier.DEVICE
        return lambda num: 0 if stays_on_device else sums[max(0, num)]

    def of(self, samples: int) -> "Trace":
        """Return the trace for another number of samples."""
        made, factor = dict[int, BlockTrace](), Fraction(samples, self.samples)

        def times(block_trace: BlockTrace) -> BlockTrace:
            if id(block_trace) not in made:
                sizes: dict[str, Any] = {name: ceil(getattr(block_trace, name) * factor) for name in _SIZES}
                sizes |= {name: getattr(block_trace, name).scaled(factor) for name in _SCALED}
                forward, backward = _times(block_trace.forward, factor), _times(block_trace.backward, factor)
                made[id(block_trace)] = replace(block_trace, forward=forward, backward=backward, **sizes)
            return made[id(block_trace)]

        return replace(
            self,
            prologue=times(self.prologue),
            blocks=tuple(map(times, self.blocks)),
            epilogue=times(self.epilogue),
            shared_inputs=self.shared_inputs.scaled(factor),
            batch_bytes=ceil(self.batch_bytes * factor),
            samples=samples,
        )


# Fields that grow with the number of samples.
_SIZES = ("received_bytes", "input_bytes", "deferred_bytes", "stage_end_bytes")
_SCALED = ("kept", "consumed", "forward_peak", "backward_peak", "in_place_peak")


def _times(work: Work, factor: Fraction) -> Work:
    flops, moved = ceil(work.flops * factor), ceil(work.moved_bytes * factor)
    sent = Counter({axis: ceil(num * factor) for axis, num in work.sent.items()})
    jobs = Counter[tuple[str, int]]()
    for (kind, size), num in work.jobs.items():
        jobs[kind, ceil(size * factor)] += num
    return Work(flops, moved, work.num_ops, jobs, sent, work.calls)
