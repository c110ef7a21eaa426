"""Memory, computation and communication of a forward and a backward, block by block."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any

from partita.prediction.chunk_activations import ChunkBytes
from partita.prediction.trace.chunk_peaks import ChunkPeaks
from partita.prediction.trace.sizes import NO_PEAK, NOTHING, Peak, Size
from partita.table.residence import Tier


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
        return ChunkPeaks(self, start, stop).bytes([*pending] or [0] * (1 + stop - start), in_place)

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
