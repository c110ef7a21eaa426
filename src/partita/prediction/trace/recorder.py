"""Recorder of a forward and a backward: the storages that they allocate and free, and the operators that they run."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from partita.errors import ConfigError
from partita.parallel.pipeline.deferred_gradients import DeferredGradients
from partita.parallel.tensor.functions import CopyToTensorRanks
from partita.prediction.trace.block_trace import BlockTrace, Trace, Work
from partita.prediction.trace.counted_groups import SentCounter
from partita.prediction.trace.fewer_blocks import BlockMap
from partita.prediction.trace.sizes import NOTHING, Peaks, Size
from partita.prediction.trace.storages import StorageId, Storages

# Kinds of operators that take longer than reading and writing their tensors, by patterns of names; the first match
# counts. A ``function`` applies to each element or row. Names with ``hard`` are piecewise linear, and excluded.
_KINDS = {
    "batch_norm_backward": re.compile(r"batch_norm.*backward"),
    "batch_norm": re.compile(r"batch_norm"),
    "pool": re.compile(r"pool\dd(_with_indices)?$"),
    "function": re.compile(r"exp|log|gelu|silu|(?<!hard)(tanh|sigmoid)|softmax|norm|erf|rsqrt|sin|cos|pow|div"),
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

# (phase, number of the block). The prologue has the number -1; the epilogue has the number of blocks.
Position = tuple[str, int]


class Recorder(TorchDispatchMode):
    """Recorder of live bytes and work of each block in a forward and a backward.

    If weight gradients are deferred, it also records their computation.

    Args:
        deferred: the deferred weight gradients; None: they are computed in backward.
        copy_input: keeps the last input of a block until the next input. This memory counts for no block.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        sent: SentCounter,
        storages: Storages,
        deferred: DeferredGradients | None = None,
        copy_input: CopyToTensorRanks | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = blocks
        self._sent = sent
        self._storages = storages
        self._deferred = deferred
        self._copy_input = copy_input
        self._position: Position = ("forward", -1)
        self._peaks = defaultdict[Position, Peaks](Peaks)
        self._in_place_peaks = defaultdict[Position, Peaks](Peaks)
        self._stage_end = defaultdict[Position, int](int)
        self._in_place_bytes = defaultdict[Position, int](int)
        self._work = defaultdict[Position, Work](Work)
        self._gradients = defaultdict[Position, dict[str, int]](dict)
        self._live_before = dict[int, Size]()
        self._live_after = dict[int, Size]()
        self._received = dict[int, int]()
        self._inputs = dict[int, int]()
        self._input_ids = dict[int, StorageId]()
        self._consumed = defaultdict[int, Size](Size)
        self._deferred_after = dict[
            int, int
        ]()  # by a block's number: deferred bytes of its backward and all later ones
        self._gradient_block = dict[
            int, int
        ]()  # by a parameter's id: the block whose backward has deferred its gradient
        self._prologue = self._shared_inputs = self._forward_end = NOTHING
        self._end_of_backward = 0
        self._handles = [
            handle
            for number, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(self._before_block(number), with_kwargs=True),
                block.register_forward_hook(self._after_block(number)),
            )
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------------------------------------- position

    def forward_ended(self) -> None:
        """Record the end of the forward, when only the loss and the tensors saved for backward are alive."""
        self._drop_kept_input()
        self._prologue = self._storages.early
        self._shared_inputs = self._storages.early_inputs
        self._forward_end = self._live_since_blocks
        for number, storage_id in self._input_ids.items():
            if not self._storages.is_alive(storage_id):
                self._consumed[number] = self._storages.size_of(storage_id)
        if self._blocks:
            self._move_to("backward", len(self._blocks))

    def weight_gradients_began(self) -> None:
        """Record the end of the backward, and the start of the deferred weight gradients."""
        self._end_of_backward = self._storages.live.num_bytes
        self._move_to("weights", 0)

    def gradient_ready(self, param: Tensor, name: str) -> None:
        """Record that a gradient is complete, and has been moved to gradient storage."""
        position = self._position
        if position[0] == "weights":
            position = ("backward", self._gradient_block.get(id(param), 0))
            _add(self._work[self._work_position(position)], self._work.pop(self._position, Work()))
        self._gradients[position][name] = param.nbytes
        self._in_place_bytes[position] += param.nbytes
        self._note_peak()

    @property
    def _live_since_blocks(self) -> Size:
        """Size of the live storages that were allocated since the first block's forward began.

        Earlier ones are not included, since they may be freed by the end.
        """
        return self._storages.live - self._storages.early

    def _note_peak(self) -> None:
        live, in_place = self._storages.live, self._in_place_bytes[self._position]
        self._peaks[self._position].note(live)
        self._in_place_peaks[self._position].note(live + Size(in_place, in_place))
        self._stage_end[self._position] = max(
            self._stage_end[self._position], live.num_bytes + self._storages.freed_bytes
        )

    def _before_block(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if number in self._live_before:
                raise ConfigError(
                    f"model: the block {type(module).__name__} (number {number}) runs twice in one forward: "
                    "a trace cannot distinguish several runs of one block"
                )
            self._drop_kept_input()
            self._storages.end_early()
            self._live_before[number] = self._live_since_blocks
            self._move_to("forward", number)
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._received[number] = sum(leaf.nbytes for leaf in leaves if self._storages.depends_on_params(leaf))
            for leaf in leaves:
                if leaf.requires_grad and leaf.grad_fn is not None:
                    self._inputs[number], storage_id = leaf.nbytes, self._storages.storage_id(leaf)
                    if storage_id is not None:
                        self._input_ids[number] = storage_id
                    leaf.register_hook(partial(self._backward_ends, number, storage_id))
                    break

        return hook

    def _after_block(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._drop_kept_input()
            self._live_after[number] = self._live_since_blocks
            self._move_to("forward", len(self._blocks) if number == len(self._blocks) - 1 else number)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    storage_id = self._storages.storage_id(leaf)
                    leaf.register_hook(partial(self._backward_begins, number, storage_id))
                    break

        return hook

    def _drop_kept_input(self) -> None:
        if self._copy_input is not None:
            self._copy_input.forget()

    def _backward_begins(self, number: int, output: StorageId | None, gradient: Tensor) -> None:
        self._drop_kept_input()
        if number == len(self._blocks) - 1:
            self._close_block(number + 1, self._live_after[number], output, gradient)
            self._watch_output(number, output, gradient)
        self._move_to("backward", number)

    def _backward_ends(self, number: int, value: StorageId | None, gradient: Tensor) -> None:
        self._drop_kept_input()
        self._close_block(number, self._live_before[number], value, gradient)
        self._watch_output(number - 1, value, gradient)

    def _watch_output(self, number: int, output: StorageId | None, gradient: Tensor) -> None:
        """Record that a block's backward begins, with the gradient of its output."""
        self._move_to("backward", number)
        self._storages.watch([output, self._storages.storage_id(gradient)])
        self._note_peak()

    def _close_block(self, number: int, kept: Size, value: StorageId | None, gradient: Tensor) -> None:
        """Record, at the end of a block's backward, the deferred bytes of it and of the backwards of later blocks.

        They are the live bytes without the ``gradient`` of its input ``value``, and without the bytes kept by earlier
        blocks. The value counts as kept, even if it has been freed.
        """
        storage_id = self._storages.storage_id(gradient)
        freed = 0 if value is None or self._storages.is_alive(value) else value.num_bytes
        existing = (self._prologue + kept).num_bytes + (0 if storage_id is None else storage_id.num_bytes)
        self._deferred_after[number] = self._storages.live.num_bytes + freed - existing

    def _move_to(self, phase: str, number: int) -> None:
        self._count_sent()
        if self._deferred is not None:
            for param in self._deferred.params:
                self._gradient_block.setdefault(param, self._position[1])
        if self._position != (phase, number):
            self._storages.watch([])
        self._position = (phase, number)
        self._note_peak()

    # ----------------------------------------------------------------------------------------------------- work

    def _work_position(self, position: Position) -> Position:
        """Return the position that work counts for: the backward of the epilogue counts with its forward."""
        return ("forward", position[1]) if position == ("backward", len(self._blocks)) else position

    def _count_sent(self) -> None:
        work, (num_bytes, calls) = self._work[self._work_position(self._position)], self._sent.since()
        work.sent += num_bytes
        work.calls += calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # models check their inputs: no token is masked, and no sample is packed
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in inputs}
        depends_on_params = any(map(self._storages.depends_on_params, inputs))
        result = func(*args, **kwargs)
        made = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and not self._storages.knows(storage):
                    made += storage.nbytes()
                    self._storages.add(storage, depends_on_params)
                    self._note_peak()
        self._count_operator(func, args, kwargs, result, inputs, made)
        return result

    def _count_operator(
        self, func: Any, args: Any, kwargs: Any, result: Any, inputs: Sequence[Tensor], made: int
    ) -> None:
        work = self._work[self._work_position(self._position)]
        packet = func._overloadpacket
        name = packet.__name__
        flops, kind = 0, "product"
        if name == _ATTENTION:
            flops, kind = sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape), "attention"
        elif name == f"{_ATTENTION}_backward":
            flops = sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
            kind = "attention_backward"
        elif name == "convolution":
            flops, kind = conv_flop_count(args[0].shape, args[1].shape, result.shape, args[6]), name
        elif name == "convolution_backward":
            # Each gradient has the same count. PyTorch's own counter uses a group's channels as all channels.
            each = conv_flop_count(args[1].shape, args[2].shape, args[0].shape, args[7])
            flops, kind = each * sum(args[10][:2]), name
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        elif made or name.endswith("_"):
            work.moved_bytes += (moved := made + sum(leaf.nbytes for leaf in inputs))
            read = 2 * made if name == "embedding" else moved  # only some rows of the table are read
            work.jobs[_kind_of(name), read] += 1
        else:
            return
        if flops:
            work.flops += flops
            work.jobs[kind, flops] += 1
        work.num_ops += 1

    # --------------------------------------------------------------------------------------------------- result

    def result(self, block_map: BlockMap) -> Trace:
        """Return the trace of the full model.

        ``block_map`` has the name of each block of the full model, and the block that represents it.
        """
        self._count_sent()
        num, block_traces = len(self._blocks), dict[nn.Module, BlockTrace]()
        deferred = [self._deferred_bytes(number) for number in range(num + 2)]
        for number, block in enumerate(self._blocks):
            begin, end = self._live_at(number), self._live_at(number + 1)
            block_traces[block] = replace(
                self._backward(number, end + Size(deferred[number + 1])),
                kept=end - begin,
                forward_peak=self._peaks["forward", number].above(begin),
                received_bytes=self._received[number],
                consumed=self._consumed[number],
                forward=self._work["forward", number],
                input_bytes=self._inputs.get(number, 0),
                deferred_bytes=deferred[number] - deferred[number + 1],
            )
        existing = self._live_at(num) if num else NOTHING
        prologue = replace(
            self._backward(-1, Size(deferred[0])),
            kept=self._live_at(0) if num else NOTHING,
            forward_peak=self._peaks["forward", -1].above(NOTHING),
            forward=self._work["forward", -1],
            deferred_bytes=deferred[-1] - deferred[0],
        )
        epilogue = replace(
            self._backward(num, existing) if num else BlockTrace(),
            kept=self._prologue + self._forward_end - existing if num else NOTHING,
            forward_peak=self._peaks["forward", num].above(existing),
            forward=self._work["forward", num],
            backward=Work(),
            deferred_bytes=deferred[num],
        )
        blocks = tuple(block_traces[block] for _, block in block_map)
        return Trace(
            prologue, tuple(name for name, _ in block_map), blocks, epilogue, shared_inputs=self._shared_inputs
        )

    def _live_at(self, number: int) -> Size:
        """Return the bytes that exist when a block, or the epilogue, begins.

        An input of the previous block that was not saved is not included: the caller of that block frees it at once.
        """
        if number == 0:  # its input was computed in the prologue
            return self._prologue + self._consumed[0]
        if number < len(self._blocks):
            return self._prologue + self._live_before[number]
        return self._prologue + self._live_after[number - 1] - self._consumed[number - 1]

    def _backward(self, number: int, existing: Size) -> BlockTrace:
        """Return the values of a backward. Its peaks are above ``existing``."""
        position = ("backward", number)
        return BlockTrace(
            backward_peak=self._peaks[position].above(existing),
            backward=self._work[position],
            gradients=self._gradients[position],
            in_place_peak=self._in_place_peaks[position].above(existing),
            stage_end_bytes=self._stage_end[position] - self._peaks[position].num_bytes,
        )

    def _deferred_bytes(self, number: int) -> int:
        """Return the deferred bytes after the backwards of a block and all later blocks.

        The number of blocks + 1 stands for the entire backward.
        """
        if self._deferred is None:
            return 0
        if number == len(self._blocks) + 1:
            return self._end_of_backward
        return self._deferred_after.get(number, self._end_of_backward)


def _kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "element")


def _add(work: Work, more: Work) -> None:
    work.flops += more.flops
    work.moved_bytes += more.moved_bytes
    work.num_ops += more.num_ops
    work.jobs.update(more.jobs)
    work.sent.update(more.sent)
    work.calls.update(more.calls)
