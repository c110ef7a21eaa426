"""Follows the storages that a forward and a backward make and give back, and the operators that they run."""

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from partita.errors import ConfigError
from partita.forecast.pieces import Piece, Trace, Work
from partita.forecast.ranks import Sent
from partita.forecast.shortened import Stand

# Operators that compute a function of each element, or of each row, which takes longer than reading and writing it.
_FUNCTIONS = re.compile(r"exp|log|gelu|silu|tanh|sigmoid|softmax|norm|erf|rsqrt|sin|cos|pow|div")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Recorder(TorchDispatchMode):
    """Follows live bytes and work through the pieces of a forward and a backward.

    Where it is: ``(phase, number of the block)``; before the first block's forward the number is -1, from the last
    one's end to its backward it is the number of blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], sent: Sent) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks, self._sent = blocks, sent
        self._alive: dict[int, int] = {}
        self._live = 0
        self._at: tuple[str, int] = ("forward", -1)
        self._peaks = defaultdict[tuple[str, int], int](int)
        self._growing = defaultdict[tuple[str, int], int](int)
        self._gradients = defaultdict[tuple[str, int], int](int)
        self._work = defaultdict[tuple[str, int], Work](Work)
        self._entered, self._left, self._outputs, self._inputs = (dict[int, int]() for _ in range(4))
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

    def arrived(self, gradient_bytes: int) -> None:
        """A gradient came, and went where gradients rest."""
        self._gradients[self._at] += gradient_bytes
        self._note_peak()

    def _note_peak(self) -> None:
        self._peaks[self._at] = max(self._peaks[self._at], self._live)
        self._growing[self._at] = max(self._growing[self._at], self._live + self._gradients[self._at])

    def _entering(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if number in self._entered:
                raise ConfigError(
                    f"model: the block {type(module).__name__} (number {number}) runs twice in one forward: "
                    "blocks that are used several times cannot be told apart in a trace"
                )
            self._entered[number] = self._live
            self._go("forward", number)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                    self._inputs[number] = leaf.nbytes
                    leaf.register_hook(lambda _: self._back_out_of(number))
                    break

        return hook

    def _leaving(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._left[number] = self._live
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._outputs[number] = sum(leaf.nbytes for leaf in leaves)
            self._go("forward", len(self._blocks) if number == len(self._blocks) - 1 else number)
            for leaf in leaves:
                if leaf.requires_grad:
                    leaf.register_hook(lambda _: self._go("backward", number))
                    break

        return hook

    def _back_out_of(self, number: int) -> None:
        self._go("backward", number - 1)

    def _go(self, phase: str, number: int) -> None:
        self._count_sent()
        self._at = (phase, number)
        self._note_peak()

    def _count_sent(self) -> None:
        work, (num_bytes, calls) = self._work[self._at], self._sent.since()
        work.sent += num_bytes
        work.calls += calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # what models ask of their inputs: that all tokens are there, and nothing is packed
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {leaf.untyped_storage()._cdata for leaf in given}
        result = func(*args, **kwargs)
        made = 0
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._alive:
                    made += storage.nbytes()
                    self._add(storage)
        self._note(func, args, kwargs, result, given, made)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._alive[key] = num_bytes
        self._live += num_bytes
        self._note_peak()
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live -= self._alive.pop(key)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor], made: int) -> None:
        work = self._work[self._at]
        packet = func._overloadpacket
        name = packet.__name__
        flops, kind = 0, "product"
        if name == _ATTENTION:
            flops, kind = sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape), "attention"
        elif name == f"{_ATTENTION}_backward":
            flops = sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
            kind = "attention_backward"
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
        elif made or name.endswith("_"):
            work.moved_bytes += (moved := made + sum(leaf.nbytes for leaf in given))
            read = 2 * made if name == "embedding" else moved  # of whose table only some rows are read
            work.jobs["function" if _FUNCTIONS.search(name) else "element", read] += 1
        else:
            return
        if flops:
            work.flops += flops
            work.jobs[kind, flops] += 1
        work.num_ops += 1

    def result(self, stand: Stand) -> Trace:
        """What was recorded, for every block of the whole model: (its name, the block that stands for it)."""
        self._count_sent()
        num, pieces = len(self._blocks), dict[nn.Module, Piece]()
        for number, block in enumerate(self._blocks):
            entered = self._entered[number]
            left = self._entered[number + 1] if number + 1 < num else self._left[number]
            pieces[block] = Piece(
                left - entered,
                self._peaks["forward", number] - entered,
                self._peaks["backward", number] - left,
                self._outputs[number],
                self._work["forward", number],
                self._work["backward", number],
                self._gradients["backward", number],
                self._growing["backward", number] - left,
                self._inputs.get(number, 0),
            )
        above, work, there = ("forward", num), self._work, self._left.get(num - 1, 0)
        back = ("backward", -1)
        peaks = (self._peaks["forward", -1], self._peaks[back])
        before = Piece(
            self._entered.get(0, 0),
            *peaks,
            0,
            work["forward", -1],
            work[back],
            self._gradients[back],
            self._growing[back],
        )
        after = Piece(0, self._peaks[above] - there, 0, 0, work[above], Work())
        after.gradient_bytes, after.growing_peak = self._gradients[above], self._growing[above] - there
        return Trace(before, tuple(name for name, _ in stand), tuple(pieces[block] for _, block in stand), after)
