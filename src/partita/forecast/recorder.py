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
from partita.forecast.peak import NOTHING, Peaks, Size
from partita.forecast.pieces import Piece, Trace, Work
from partita.forecast.ranks import Sent
from partita.forecast.shortened import Stand
from partita.forecast.storages import Mark, Storages
from partita.parallel.pipeline.weights import Left
from partita.parallel.tensor.functions import Entrance

# Kinds of operators that take longer than reading and writing their tensors, by patterns of names: the first match
# counts. A function applies to each element, or to each row; those called hard are piecewise linear, and excluded.
_KINDS = {
    "batch_norm_backward": re.compile(r"batch_norm.*backward"),
    "batch_norm": re.compile(r"batch_norm"),
    "pool": re.compile(r"pool\dd(_with_indices)?$"),
    "function": re.compile(r"exp|log|gelu|silu|(?<!hard)(tanh|sigmoid)|softmax|norm|erf|rsqrt|sin|cos|pow|div"),
}
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

# (phase, number of the block). What runs before the first block has the number -1, what runs after the last one has the
# number of blocks.
Place = tuple[str, int]


class Recorder(TorchDispatchMode):
    """Recorder of live bytes and work, for each piece of a forward and a backward.

    If weight gradients are computed separately, it also records the backward of the weights.

    Args:
        left: what the backward leaves for that of the weights; None: nothing is left.
        entrance: holds the last input of a block until another input arrives; it counts with neither block.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        sent: Sent,
        storages: Storages,
        left: Left | None = None,
        entrance: Entrance | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = blocks
        self._sent = sent
        self._storages = storages
        self._left_apart = left
        self._entrance = entrance
        self._at: Place = ("forward", -1)
        self._peaks = defaultdict[Place, Peaks](Peaks)
        self._growing = defaultdict[Place, Peaks](Peaks)
        self._ended = defaultdict[Place, int](int)
        self._grown = defaultdict[Place, int](int)
        self._work = defaultdict[Place, Work](Work)
        self._gradients = defaultdict[Place, dict[str, int]](dict)
        self._entered = dict[int, Size]()
        self._left = dict[int, Size]()
        self._received = dict[int, int]()
        self._inputs = dict[int, int]()
        self._given = dict[int, Mark]()
        self._consumed = defaultdict[int, Size](Size)
        self._settled = dict[int, int]()  # by a block's number: what its backward and all later ones have left
        self._left_by = dict[int, int]()  # by a parameter's id: the block whose backward has left its gradient
        self._before = self._around = self._end = NOTHING
        self._end_of_backward = 0
        self._handles = [
            handle
            for number, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(self._entering(number), with_kwargs=True),
                block.register_forward_hook(self._leaving(number)),
            )
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------------------------------------- position

    def forward_ended(self) -> None:
        """Record the end of the forward, when only the loss and what autograd keeps are alive."""
        self._forget()
        self._before = self._storages.early
        self._around = self._storages.early_apart
        self._end = self._later
        for number, mark in self._given.items():
            if not self._storages.is_there(mark):
                self._consumed[number] = self._storages.size_of(mark)
        if self._blocks:
            self._go("backward", len(self._blocks))

    def weights_began(self) -> None:
        """Record the end of the backward, which may have left weight gradients to compute."""
        self._end_of_backward = self._storages.live.num_bytes
        self._go("weights", 0)

    def arrived(self, param: Tensor, name: str) -> None:
        """Record that a gradient is complete, and has been moved to gradient storage."""
        place = self._at
        if place[0] == "weights":
            place = ("backward", self._left_by.get(id(param), 0))
            _add(self._work[self._working_at(place)], self._work.pop(self._at, Work()))
        self._gradients[place][name] = param.nbytes
        self._grown[place] += param.nbytes
        self._note_peak()

    @property
    def _later(self) -> Size:
        """Size of the live storages that were allocated since the first block's forward began.

        Earlier ones are left out, since they may be freed by the end.
        """
        return self._storages.live - self._storages.early

    def _note_peak(self) -> None:
        live, grown = self._storages.live, self._grown[self._at]
        self._peaks[self._at].note(live)
        self._growing[self._at].note(live + Size(grown, grown))
        self._ended[self._at] = max(self._ended[self._at], live.num_bytes + self._storages.missed)

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if number in self._entered:
                raise ConfigError(
                    f"model: the block {type(module).__name__} (number {number}) runs twice in one forward: "
                    "blocks that are used several times cannot be told apart in a trace"
                )
            self._forget()
            self._storages.end_early()
            self._entered[number] = self._later
            self._go("forward", number)
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._received[number] = sum(leaf.nbytes for leaf in leaves if self._storages.depends(leaf))
            for leaf in leaves:
                if leaf.requires_grad and leaf.grad_fn is not None:
                    self._inputs[number], mark = leaf.nbytes, self._storages.mark(leaf)
                    if mark is not None:
                        self._given[number] = mark
                    leaf.register_hook(partial(self._back_out_of, number, mark))
                    break

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._forget()
            self._left[number] = self._later
            self._go("forward", len(self._blocks) if number == len(self._blocks) - 1 else number)
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    mark = self._storages.mark(leaf)
                    leaf.register_hook(partial(self._back_into, number, mark))
                    break

        return hook

    def _forget(self) -> None:
        if self._entrance is not None:
            self._entrance.forget()

    def _back_into(self, number: int, output: Mark | None, gradient: Tensor) -> None:
        self._forget()
        if number == len(self._blocks) - 1:
            self._settle(number + 1, self._left[number], output, gradient)
            self._watch(number, output, gradient)
        self._go("backward", number)

    def _back_out_of(self, number: int, given: Mark | None, gradient: Tensor) -> None:
        self._forget()
        self._settle(number, self._entered[number], given, gradient)
        self._watch(number - 1, given, gradient)

    def _watch(self, number: int, output: Mark | None, gradient: Tensor) -> None:
        """Record that a block's backward begins, given the gradient of its output to the next block."""
        self._go("backward", number)
        self._storages.watch([output, self._storages.mark(gradient)])
        self._note_peak()

    def _settle(self, number: int, kept: Size, value: Mark | None, gradient: Tensor) -> None:
        """Record, at the end of a block's backward, the bytes that it and the backwards of later blocks have left.

        They are the live bytes without the ``gradient`` of its input ``value``, and without what earlier blocks have
        kept. The value is part of that, but may have been freed.
        """
        mark = self._storages.mark(gradient)
        gone = 0 if value is None or self._storages.is_there(value) else value.num_bytes
        there = (self._before + kept).num_bytes + (0 if mark is None else mark.num_bytes)
        self._settled[number] = self._storages.live.num_bytes + gone - there

    def _go(self, phase: str, number: int) -> None:
        self._count_sent()
        if self._left_apart is not None:
            for param in self._left_apart.params:
                self._left_by.setdefault(param, self._at[1])
        if self._at != (phase, number):
            self._storages.watch([])
        self._at = (phase, number)
        self._note_peak()

    # ----------------------------------------------------------------------------------------------------- work

    def _working_at(self, place: Place) -> Place:
        """Return the place that work counts for: the backward of what runs after all blocks counts with its forward."""
        return ("forward", place[1]) if place == ("backward", len(self._blocks)) else place

    def _count_sent(self) -> None:
        work, (num_bytes, calls) = self._work[self._working_at(self._at)], self._sent.since()
        work.sent += num_bytes
        work.calls += calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # models check their inputs: all tokens are present, and nothing is packed
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in given}
        depends = any(map(self._storages.depends, given))
        result = func(*args, **kwargs)
        made = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and not self._storages.knows(storage):
                    made += storage.nbytes()
                    self._storages.add(storage, depends)
                    self._note_peak()
        self._note(func, args, kwargs, result, given, made)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor], made: int) -> None:
        work = self._work[self._working_at(self._at)]
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
            # The same for each gradient. PyTorch's own counter mistakes a group's channels for all channels.
            each = conv_flop_count(args[1].shape, args[2].shape, args[0].shape, args[7])
            flops, kind = each * sum(args[10][:2]), name
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        elif made or name.endswith("_"):
            work.moved_bytes += (moved := made + sum(leaf.nbytes for leaf in given))
            read = 2 * made if name == "embedding" else moved  # only some rows of the table are read
            work.jobs[_kind_of(name), read] += 1
        else:
            return
        if flops:
            work.flops += flops
            work.jobs[kind, flops] += 1
        work.num_ops += 1

    # --------------------------------------------------------------------------------------------------- result

    def result(self, stand: Stand) -> Trace:
        """Return the trace of the full model.

        ``stand`` has the name of every block of the full model, and the block that represents it.
        """
        self._count_sent()
        num, pieces = len(self._blocks), dict[nn.Module, Piece]()
        settled = [self._left_after(number) for number in range(num + 2)]
        for number, block in enumerate(self._blocks):
            entered, left = self._begun(number), self._begun(number + 1)
            pieces[block] = replace(
                self._backward(number, left + Size(settled[number + 1])),
                kept=left - entered,
                forward_peak=self._peaks["forward", number].above(entered),
                received_bytes=self._received[number],
                consumed=self._consumed[number],
                forward=self._work["forward", number],
                input_bytes=self._inputs.get(number, 0),
                left_bytes=settled[number] - settled[number + 1],
            )
        there = self._begun(num) if num else NOTHING
        before = replace(
            self._backward(-1, Size(settled[0])),
            kept=self._begun(0) if num else NOTHING,
            forward_peak=self._peaks["forward", -1].above(NOTHING),
            forward=self._work["forward", -1],
            left_bytes=settled[-1] - settled[0],
        )
        after = replace(
            self._backward(num, there) if num else Piece(),
            kept=self._before + self._end - there if num else NOTHING,
            forward_peak=self._peaks["forward", num].above(there),
            forward=self._work["forward", num],
            backward=Work(),
            left_bytes=settled[num],
        )
        blocks = tuple(pieces[block] for _, block in stand)
        return Trace(before, tuple(name for name, _ in stand), blocks, after, around=self._around)

    def _begun(self, number: int) -> Size:
        """Return the bytes that exist when a block begins, or, after the last block, when what follows it begins.

        An input of the previous block that nothing has kept is left out: only the caller of that block still holds it
        for a moment.
        """
        if number == 0:  # its input was computed before
            return self._before + self._consumed[0]
        if number < len(self._blocks):
            return self._before + self._entered[number]
        return self._before + self._left[number - 1] - self._consumed[number - 1]

    def _backward(self, number: int, there: Size) -> Piece:
        """Return a piece with the values of a backward; its peaks are above ``there``."""
        place = ("backward", number)
        return Piece(
            backward_peak=self._peaks[place].above(there),
            backward=self._work[place],
            gradients=self._gradients[place],
            growing_peak=self._growing[place].above(there),
            ended_bytes=self._ended[place] - self._peaks[place].num_bytes,
        )

    def _left_after(self, number: int) -> int:
        """Return the bytes that the backwards of a block and all later blocks have left to compute weight gradients.

        The number of blocks + 1 stands for the entire backward.
        """
        if self._left_apart is None:
            return 0
        if number == len(self._blocks) + 1:
            return self._end_of_backward
        return self._settled.get(number, self._end_of_backward)


def _kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "element")


def _add(work: Work, more: Work) -> None:
    work.flops += more.flops
    work.moved_bytes += more.moved_bytes
    work.num_ops += more.num_ops
    work.jobs.update(more.jobs)
    work.sent.update(more.sent)
    work.calls.update(more.calls)
