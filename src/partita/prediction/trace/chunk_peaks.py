"""Bytes of a forward and a backward through consecutive blocks of a trace."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from partita.activation.inputs import NUM_STAYING
from partita.prediction.chunk_activations import ChunkBytes
from partita.table.residence import Tier

if TYPE_CHECKING:
    from partita.prediction.trace.block_trace import BlockTrace, Trace

# Number of offloaded inputs still on the device, in addition to that of the running block: the copy of an input ends
# while the second block after its own runs.
NUM_ON_DEVICE = NUM_STAYING + 1


@dataclass(frozen=True, kw_only=True)
class BackwardBytes:
    """Peaks of a backward, and the bytes that it leaves (see :class:`ChunkBytes`)."""

    peak: int
    in_place_peak: int
    gradient_bytes: int
    deferred_bytes: int


class ChunkPeaks:
    """The memory of the blocks ``[start, stop)`` of a trace while they run.

    The prologue runs before the first block of the trace, and the epilogue after the last one.
    """

    def __init__(self, trace: "Trace", start: int, stop: int) -> None:
        self._blocks = trace.blocks[start:stop]
        self._prologue = trace.prologue if start == 0 else None
        self._epilogue = trace.epilogue if stop == len(trace.blocks) else None
        # The output that a stage sends, and its gradient, stay until the stage's backward is done.
        self._sent_bytes = 0 if self._epilogue else trace.blocks[stop].received_bytes
        self._received_bytes = sum(block.received_bytes for block in self._blocks[:1])
        inputs = [0 if trace.offload_tier is Tier.DEVICE else block.input_bytes for block in self._blocks]
        self._offloaded = list(accumulate(inputs, initial=0))
        before_blocks = self._prologue.kept.num_bytes if self._prologue else self._received_bytes
        kept = [block.kept.num_bytes for block in self._blocks]
        if not self._prologue:
            before_blocks += trace.shared_inputs.num_bytes
            if kept:
                kept[0] += self._blocks[0].consumed.num_bytes
        # Bytes kept before each block, and after the last one, offloaded inputs included.
        self._kept_before = list(accumulate(kept, initial=before_blocks))

    def bytes(self, pending: Sequence[int], in_place: Set[str]) -> ChunkBytes:
        """Return the bytes of a forward and a backward.

        Args:
            pending: bytes of gradients that are still in ``param.grad``: during the backward of the prologue, and
                during that of each block.
            in_place: names of parameters whose gradients stay in ``param.grad``.
        """
        num = len(self._blocks)
        backward = self._backward_bytes(pending, in_place)
        return ChunkBytes(
            forward_peak=self._forward_peak(),
            kept_bytes=self._kept_before[-1]
            - self._offloaded_bytes(num)
            + (self._epilogue.kept.num_bytes if self._epilogue else 0),
            backward_peak=backward.peak,
            in_place_peak=backward.in_place_peak,
            gradient_bytes=backward.gradient_bytes,
            deferred_bytes=backward.deferred_bytes,
            sent_bytes=0 if self._prologue else self._received_bytes,
            offloaded_bytes=(self._offloaded_bytes(num - NUM_STAYING), self._offloaded_bytes(num)),
            unfinished_offload_bytes=self._offloaded_bytes(num) - self._offloaded_bytes(num - NUM_ON_DEVICE),
        )

    def _offloaded_bytes(self, num: int) -> int:
        """Return the bytes of the offloaded inputs of the first ``num`` blocks."""
        return self._offloaded[max(0, num)]

    @property
    def _kept_after_blocks(self) -> int:
        """Bytes on the device when the forward of all blocks is done."""
        return self._kept_before[-1] - self._offloaded_bytes(len(self._blocks) - NUM_ON_DEVICE)

    def _forward_peak(self) -> int:
        peaks = [self._prologue.forward_peak.num_bytes if self._prologue else self._kept_before[0]]
        peaks += [
            self._kept_before[at] - self._offloaded_bytes(at - NUM_ON_DEVICE) + block.forward_peak.num_bytes
            for at, block in enumerate(self._blocks)
        ]
        if self._epilogue:
            peaks.append(self._kept_after_blocks + self._epilogue.forward_peak.num_bytes)
        return max(peaks)

    def _backward_bytes(self, pending: Sequence[int], in_place: Set[str]) -> BackwardBytes:
        peak = in_place_peak = self._kept_after_blocks + self._sent_bytes
        gradients = deferred = 0
        for block, existing in reversed(list(self._before_backwards(pending))):
            base = existing + deferred
            stay, with_gradients = block.growth(in_place)
            peak = max(peak, base + block.backward_peak.num_bytes)
            in_place_peak = max(in_place_peak, base + with_gradients + gradients)
            gradients += stay
            deferred += block.deferred_bytes
        return BackwardBytes(peak=peak, in_place_peak=in_place_peak, gradient_bytes=gradients, deferred_bytes=deferred)

    def _before_backwards(self, pending: Sequence[int]) -> "Iterator[tuple[BlockTrace, int]]":
        """Yield each block, and the bytes of all other tensors when its backward begins, in the order of forward."""
        num, sent = len(self._blocks), 2 * self._sent_bytes
        if self._prologue:
            yield self._prologue, pending[0] + sent
        for at, block in enumerate(self._blocks):
            kept = self._kept_before[at + 1] - self._offloaded_bytes(min(at - 1, num - NUM_ON_DEVICE))
            ends_stage = at == num - 1 and not self._epilogue
            yield block, kept + pending[at + 1] + (block.stage_end_bytes if ends_stage else sent)
        if self._epilogue:
            yield self._epilogue, self._kept_after_blocks
