"""A head (output layer) and its loss, computed tile by tile: the logits of a batch are never all in memory.

The gradients of a tile are computed directly after its loss, so that each logit is computed once. The loss saves
nothing of the size of the logits for backward.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.activation.deferred_logits import DeferredLogits, Origin
from partita.config.schema import Loss
from partita.errors import ConfigError, PartitaError
from partita.layout.units import modules_like
from partita.memory.autocast import autocast, autocast_dtype
from partita.parallel.sequence.apply import SlicedOutputLayer
from partita.parallel.sequence.blocks import Blocks
from partita.parallel.sequence.exchange import slice_for_rank, sum_over_slices
from partita.parallel.sequence.slices import Slices
from partita.parallel.sharded_logits import LogitsSharding, Vocabulary, as_sharded_logits
from partita.parallel.tensor.functions import copy_to_ranks
from partita.parallel.tensor.linear import LinearForward
from partita.parallel.tensor.vocabulary import OutputLayerSplit
from partita.sharding.compiler import constant
from partita.sharding.deferred import Deferred
from partita.sharding.hooks import Hook
from partita.sharding.precision import InFp32
from partita.table.place import even
from partita.transforms.modules import Level, find

KEY = "loss.head"
# The largest number of rows of a tile: with more, matrix products are not faster.
MOST_ROWS = 1024


def tile_heads(heads: Mapping[str, nn.Linear], settings: Loss, changes: Level) -> None:
    """Make heads return deferred logits."""
    tile_bytes = None if isinstance(settings.tiled, str) else settings.tiled
    for name, module in heads.items():
        head = TiledHead(name, module, tile_bytes)
        changes.wrap_forward(module, head)
        changes.wrap_call(module, head.call)


def find_heads(model: nn.Module, settings: Loss, units: Iterable[str]) -> dict[str, nn.Linear]:
    """Return the layers whose logits are computed in tiles, by name: those that ``loss.head`` selects.

    Args:
        units: names of the model's units. ``auto`` selects the result of the model's ``get_output_embeddings``, else
        the
            last linear layer outside the units that has more outputs than inputs.

    Raises:
        ConfigError: there are none, one is no plain linear layer, or tensor parallelism has split one in another way
            than by the vocabulary.
    """
    if settings.tiled == "none":
        return {}
    if isinstance(settings.head, str):
        found = _default_head(model, list(units))
    else:
        found = [module for text in settings.head for module in modules_like(model, text, KEY)]
    chosen = {id(module) for module in found}
    heads = dict[str, nn.Linear]()
    for name, module in model.named_modules():
        if id(module) not in chosen:
            continue
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            raise ConfigError(
                f"loss.tiled: '{name}': expected a plain linear layer (torch.nn.Linear) as the output layer; got "
                f"{type(module).__name__}: name another layer in loss.head, or set loss.tiled to none"
            )
        heads[name] = module
        LossShare.of(name, module)
    return heads


def _default_head(model: nn.Module, units: Sequence[str]) -> list[nn.Module]:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        return [output]
    blocks = {name for name in units if name and any(True for _ in model.get_submodule(name).children())}
    widening: list[nn.Module] = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features > module.in_features
        and not any(name.startswith(f"{block}.") for block in blocks)
    ]
    if not widening:
        raise ConfigError(
            f"loss.tiled: found no output layer of {type(model).__name__} (a linear layer outside the repeated blocks "
            "with more outputs than inputs); name it in loss.head"
        )
    return widening[-1:]


class TiledHead:
    """A linear layer whose calls return :class:`~partita.activation.deferred_logits.DeferredLogits`, if it trains.

    The loss is computed inside a call of the layer, whose hooks unshard its weight once for all tiles.
    """

    def __init__(self, name: str, module: nn.Linear, tile_bytes: int | None) -> None:
        self._name = name
        self._module = module
        self._tile_bytes = tile_bytes
        self._warned = False
        self._loss: Callable[[Tensor], Tensor] | None = None

    def call(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Wrapper of the layer's call: return deferred logits."""
        module = self._module
        hidden = args[0] if len(args) == 1 and not kwargs else None
        trains = isinstance(hidden, Tensor) and (
            hidden.requires_grad or any(param.requires_grad for param in module.parameters())
        )
        is_wrapped = find(module, TiledHead) is self  # False if other code has replaced the forward
        if not (trains and is_wrapped and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return own(*args, **kwargs)
        if any(not isinstance(hook, Hook) for hook in module._forward_hooks.values()):
            self._warn("a forward hook on the layer")
            return own(*args, **kwargs)
        assert hidden is not None
        dtype, around = hidden.dtype, cast(Callable[[], AbstractContextManager[Any]], nullcontext)
        if (in_fp32 := find(module, InFp32)) is not None:
            dtype, around = torch.float32, in_fp32.mode.fp32_context
        elif (narrow := autocast_dtype(hidden.device)) is not None:
            dtype, around = narrow, partial(autocast, hidden.device, narrow, torch.is_autocast_cache_enabled())
        call = DeferredCall(self, own, hidden, around)
        return DeferredLogits.of(Origin(call, hidden, module.out_features, dtype, hidden.dim() - 1))

    def compute(self, loss: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Compute ``loss(rows)`` in place of the layer's forward, between its hooks."""
        self._loss = loss
        try:
            computed: Tensor = self._module._call_impl(rows)
        finally:
            self._loss = None
        return computed

    def __call__(self, own: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Wrapper of the layer's forward: compute the pending loss in its place, if there is one."""
        if self._loss is not None:
            return self._loss(*args, **kwargs)
        if torch.compiler.is_compiling():
            self._warn_while_compiling()
        return own(*args, **kwargs)

    def warn_of(self, asked_by: str) -> None:
        """Warn once that all logits are computed."""
        self._warn(f"'{asked_by}'")

    @property
    def share(self) -> "LossShare":
        """This rank's share of the loss."""
        return LossShare.of(self._name, self._module)

    def rows_of_tile(self, itemsize: int) -> int:
        """Return the number of rows of logits in a tile, with ``itemsize`` bytes per number."""
        if self._tile_bytes is None:
            return min(self._module.in_features, MOST_ROWS)
        return max(1, self._tile_bytes // (self._module.out_features * itemsize))

    @property
    def weight(self) -> Tensor:
        """The weight [classes, in]; it is sharded between calls of the layer."""
        return self._module.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias [classes]."""
        return self._module.bias

    def versions(self, hidden: Tensor) -> tuple[int, int]:
        """Return the version counters of the weight and of an input."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._module.weight._version, hidden._version

    @constant
    def _warn_while_compiling(self) -> None:
        self._warn("a compiled forward")

    def _warn(self, reader: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"all logits of '{self._name}' are computed, because {reader} reads them: set loss.tiled to none, or "
                "compute the loss only by labels= or F.cross_entropy (mean or sum, without class weights)",
                stacklevel=4,
            )


@dataclass(frozen=True)
class LossShare:
    """This rank's share of the loss of a head.

    Attributes:
        vocabulary: the split of the classes over tensor ranks; None: the rank has all classes.
        blocks: the blocks whose sequence ranks divide the rows evenly; None: the rank has all rows.
        block: the context in which the head's weight is this rank's shard.
    """

    vocabulary: Vocabulary | None
    blocks: Blocks | None
    block: AbstractContextManager[None]

    @staticmethod
    def of(name: str, module: nn.Module) -> "LossShare":
        """Return the share that the parallel axes' wrappers of the head's forward define.

        Raises:
            ConfigError: tensor parallelism has split the head in another way than by the vocabulary.
        """
        slices, head = find(module, SlicedOutputLayer), find(module, LinearForward)
        blocks = None if slices is None else slices.blocks
        if head is None:
            return LossShare(None, blocks, nullcontext())
        if not isinstance(head, OutputLayerSplit):
            raise ConfigError(
                f"loss.tiled: the output layer '{name}' is split over tensor ranks, but not by the vocabulary; set "
                f"'vocabulary' for it in parallel.tensor_rules, or loss.tiled to none"
            )
        return LossShare(head.split.vocabulary, blocks, head.own)

    def rank_rows(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Slices | None]:
        """Return this rank's rows, their targets, and the slices of the rows (None: the rank has all rows)."""
        if self.vocabulary is not None:
            rows = copy_to_ranks(rows, self.vocabulary.group)
        if self.blocks is None or not self.blocks.enabled or self.blocks.slices is None:
            return rows, target, None
        whole = self.blocks.slices
        slices = Slices(tuple(even(len(rows), whole.group.size)), whole.group, whole.mesh)
        return slice_for_rank(rows, 0, slices), slices.take(target, 0), slices


class DeferredCall:
    """A deferred call of a head, ``own(hidden)`` with ``hidden`` [..., in]."""

    def __init__(
        self,
        head: TiledHead,
        own: Callable[..., Any],
        hidden: Tensor,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._head = head
        self._own = own
        self._hidden = hidden
        self._versions = head.versions(hidden)
        self._around = around

    def logits(self, origin: Origin, asked_by: str) -> Tensor:
        self._check_unchanged()
        self._head.warn_of(asked_by)
        with self._around():
            output: Tensor = self._own(origin.hidden)
        return output

    def full_logits(self, origin: Origin, asked_by: str) -> Tensor:
        output = self.logits(origin, asked_by)
        return output.read(asked_by) if isinstance(output, Deferred) else output

    def summed_loss(self, origin: Origin, target: Tensor, ignored: int, smoothing: float) -> Tensor:
        self._check_unchanged()
        head, rows = self._head, origin.hidden.flatten(0, -2)
        if origin.dtype == torch.float32:
            rows = rows.float()
        share = head.share
        rows, target, slices = share.rank_rows(rows, target)
        num = head.rows_of_tile(origin.dtype.itemsize)
        tiles = Tiles(origin, target, ignored, smoothing, num, share.vocabulary)

        def loss(rows: Tensor) -> Tensor:
            with share.block, self._around():
                summed: Tensor = TiledLoss.apply(rows, head.weight, head.bias, tiles)  # type: ignore[no-untyped-call]
            return summed

        summed = head.compute(loss, rows)
        return summed if slices is None else sum_over_slices(summed, slices)

    def _check_unchanged(self) -> None:
        if self._head.versions(self._hidden) != self._versions:
            raise PartitaError(
                "deferred logits (loss.tiled) are read after the parameters, or the layer's input, were changed: read "
                "them before engine.step(), or set loss.tiled to none"
            )


@dataclass(frozen=True)
class Tiles:
    """The arguments of ``F.cross_entropy`` for the logits of ``origin``, and the number of ``rows`` of a tile. The
    logits are those of this rank's part of the ``vocabulary`` (None: of all classes).
    """

    origin: Origin
    target: Tensor
    ignored: int
    smoothing: float
    rows: int
    vocabulary: Vocabulary | None

    def loss(self, logits: Tensor, start: int) -> Tensor:
        """Return the summed loss of the tile that begins at row ``start``, given the head's output."""
        target = self.target[start : start + self.rows]
        changed = self.origin.apply_ops(
            logits if self.vocabulary is None else as_sharded_logits(logits, LogitsSharding(self.vocabulary))
        )
        sums = torch.promote_types(changed.dtype, torch.float32)  # sums of many losses are out of fp16's range
        kind = "sum" if changed.dtype == sums else "none"
        losses = F.cross_entropy(
            changed, target, ignore_index=self.ignored, label_smoothing=self.smoothing, reduction=kind
        )
        return losses.sum(dtype=sums)


class TiledLoss(torch.autograd.Function):
    """The summed loss of hidden states [rows, in] under a weight [classes, in] and a bias [classes] or None."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        sums = torch.promote_types(hidden.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        d_weight = torch.zeros_like(weight, dtype=sums) if of_weight else None
        d_bias = torch.zeros_like(bias, dtype=sums) if bias is not None and of_bias else None
        total = hidden.new_zeros((), dtype=sums)
        for start in range(0, len(hidden), tiles.rows):
            rows = hidden[start : start + tiles.rows]
            logits = F.linear(rows, weight, bias).requires_grad_()
            with torch.enable_grad():
                loss = tiles.loss(logits, start)
            total += loss.detach()
            (d_logits,) = torch.autograd.grad(loss, logits)
            del logits, loss
            if d_hidden is not None:
                d_hidden[start : start + tiles.rows] = d_logits @ weight
            if d_weight is not None:
                _add_product(d_weight, d_logits.t(), rows)
            if d_bias is not None:
                d_bias += d_logits.sum(0, dtype=sums)
            del d_logits  # free it before the next tile
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise PartitaError(
                "create_graph=True: a loss that is computed in tiles (loss.tiled) does not support gradients of "
                "gradients: set loss.tiled to none"
            )
        d_hidden, d_weight, d_bias = (_scaled(gradient, d_loss) for gradient in ctx.saved_tensors)
        d_weight, d_bias = (None if d is None else d.to(ctx.dtype) for d in (d_weight, d_bias))
        return d_hidden, d_weight, d_bias, None


def _add_product(total: Tensor, lhs: Tensor, rhs: Tensor) -> None:
    if lhs.dtype == rhs.dtype == total.dtype:
        total.addmm_(lhs, rhs)
    else:
        total += lhs @ rhs


def _scaled(gradient: Tensor | None, factor: Tensor) -> Tensor | None:
    """Multiply a gradient by a factor; in place, to save memory, unless the graph is retained."""
    if gradient is None:
        return None
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * factor.to(gradient.dtype)
    return gradient.mul_(factor)
