"""Attention over a split sequence: the ranks exchange tensors, and the model's own attention function runs on them.

Calls of transformers' attention interface and of ``F.scaled_dot_product_attention`` are intercepted.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.parallel.dot_product import DotProduct, ReplaceSdpa
from partita.parallel.sequence.choose import ALL_TO_ALL, GATHER_KEYS, Sizes, choose
from partita.parallel.sequence.exchange import gather, heads_for_positions, positions_for_heads, take_heads
from partita.parallel.sequence.ring import ring_attention
from partita.parallel.sequence.slices import Slices
from partita.sharding.compiler import eager

# The slices of the running block; global, because transformers' registry of attention functions is global.
_current_slices: ContextVar[Slices | None] = ContextVar("_current_slices", default=None)
# True if the running attention module is cross-attention: the keys of an encoder are not split.
is_cross_attention: ContextVar[bool] = ContextVar("is_cross_attention", default=False)
_PREFIX = "partita_"
# The attention implementations of transformers that accept a dense mask.
IMPLEMENTATIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of an attention function.

    Attributes:
        query: ``[batch, heads, positions, size]``.
        key: ``[batch, key heads, positions, size]``; the number of heads is a multiple of the number of key heads.
        value: like ``key``.
        mask: of the full sequence, broadcastable to ``[batch, heads, positions, positions]``.
        causal: attention is causal, and has no mask.
        bias: added to the scores, with the shape of a mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    bias: Tensor | None = None

    @property
    def num_groups(self) -> int:
        """The number of query heads that share a key head."""
        return self.query.shape[1] // self.key.shape[1]


AttentionFunction = Callable[[AttentionCall], Tensor]


def current_slices() -> Slices | None:
    """Return the slices of the running block; None outside a block, or if the block has all positions."""
    return _current_slices.get()


@eager
def sequence_attention(
    call: AttentionCall,
    slices: Slices,
    own: AttentionFunction,
    *,
    needs_all_heads: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention for a call whose tensors have this rank's positions: ``[batch, heads, own positions, size]``.

    Args:
        own: the model's own attention function; it is called with the exchanged tensors.
        needs_all_heads: the function reads other tensors by head, which are not in the call.
        scale: the scale of the scores if the function is ``softmax(scores) @ value``; None if it does more.

    Raises:
        PartitaError: the call's queries and keys do not have this rank's positions.
    """
    positions = tuple(stop - start for start, stop in slices.ranges)
    batch, heads, num_own, head_dim = call.query.shape
    if num_own != slices.num_own or call.key.shape[2] != num_own:
        raise PartitaError(
            f"parallel.sequence: expected attention over this rank's {slices.num_own} of {slices.length} positions; "
            f"got {num_own} queries and {call.key.shape[2]} keys. Only self-attention within the input of a block is "
            "supported: generate text inside engine.gathered(), or set parallel.sequence: 1"
        )
    if slices.group.size == 1:
        return own(call)
    value_dim, itemsize = call.value.shape[3], call.query.itemsize
    sizes = Sizes(heads, call.key.shape[1], head_dim, value_dim, positions, batch, itemsize)
    causal = call.causal and call.mask is None
    method = choose(sizes, needs_all_heads=needs_all_heads, ring=scale is not None, causal=causal)
    if method == ALL_TO_ALL:
        return attention_by_heads(call, slices, own, sizes)
    if method == GATHER_KEYS:
        key, value = (gather(x, 2, slices) for x in (call.key, call.value))
        return own(_for_own_queries(replace(call, key=key, value=value), slices))
    assert scale is not None
    assert call.bias is None
    return ring_attention(call.query, call.key, call.value, _mask_of_queries(call, slices), slices, scale)


def attention_by_heads(call: AttentionCall, slices: Slices, own: AttentionFunction, sizes: Sizes) -> Tensor:
    """Compute attention over full sequences for this rank's heads. Tensors are those of :func:`sequence_attention`."""
    heads = sizes.own_heads
    query = heads_for_positions(call.query, heads, slices)
    key, value = (heads_for_positions(x, sizes.own_key_heads, slices) for x in (call.key, call.value))
    mask, bias = (_of_heads(x, heads[slices.group.index]) for x in (call.mask, call.bias))
    result: Tensor = positions_for_heads(
        own(replace(call, query=query, key=key, value=value, mask=mask, bias=bias)), heads, slices
    )
    return result


def _of_heads(x: Tensor | None, heads: Sequence[int]) -> Tensor | None:
    return take_heads(x, heads) if x is not None and x.dim() == 4 and x.shape[1] > 1 else x


def _for_own_queries(call: AttentionCall, slices: Slices) -> AttentionCall:
    """Return a call with the mask and bias of this rank's queries over all keys."""
    return replace(call, mask=_mask_of_queries(call, slices), causal=False, bias=_rows(call.bias, slices))


def _mask_of_queries(call: AttentionCall, slices: Slices) -> Tensor | None:
    """Return the mask of this rank's queries over all keys; None if every query sees every key."""
    if call.mask is None and call.causal:
        position = torch.arange(slices.length, device=call.query.device)
        return (position[slices.own, None] >= position)[None, None]
    return _rows(call.mask, slices)


def _rows(x: Tensor | None, slices: Slices) -> Tensor | None:
    return x if x is None or x.shape[-2] == 1 else slices.take(x, x.dim() - 2)


@contextmanager
def on_slices(slices: Slices | None, *, intercept: bool) -> Iterator[None]:
    """Run attention in the ``with`` block on this rank's slices (None: on all positions).

    Args:
        intercept: the model calls ``F.scaled_dot_product_attention`` directly, not transformers' interface.
    """
    token = _current_slices.set(slices)
    try:
        if intercept and slices is not None:
            with ReplaceSdpa(partial(_sdpa_on_slices, slices)):
                yield
        else:
            yield
    finally:
        _current_slices.reset(token)


def _sdpa_on_slices(slices: Slices, asked: DotProduct) -> Tensor:
    def own(call: AttentionCall) -> Tensor:
        return F.scaled_dot_product_attention(
            call.query,
            call.key,
            call.value,
            attn_mask=call.mask,
            dropout_p=asked.dropout_p,
            is_causal=call.causal,
            scale=asked.scale,
            enable_gqa=call.num_groups > 1,
        )

    scale = asked.scale or asked.query.shape[-1] ** -0.5
    call = AttentionCall(asked.query, asked.key, asked.value, asked.attn_mask, asked.is_causal)
    return sequence_attention(call, slices, own, scale=None if asked.dropout_p else scale)


# ------------------------------------------------------------------ transformers


def register_in_transformers(kind: str) -> str:
    """Register a variant of a transformers attention function that works on slices; return its name."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = _PREFIX + kind
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _TransformersAttention(kind))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    return name


class _TransformersAttention:
    """An attention function of transformers' interface that also works on slices."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        own, slices = self._own(module), _current_slices.get()
        if slices is None:
            result: tuple[Tensor, Tensor | None] = own(module, query, key, value, attention_mask, **others)
            return result
        bias, across = others.pop("position_bias", None), is_cross_attention.get()
        num_keys = key.shape[2] if across else slices.length
        if bias is not None and (bias.shape[-2] not in (1, slices.length) or bias.shape[-1] not in (1, num_keys)):
            raise PartitaError(
                f"parallel.sequence: {type(module).__name__}: expected an attention bias of all {slices.length} "
                f"queries and {num_keys} keys; got {tuple(bias.shape)}: set parallel.sequence: 1"
            )
        others.pop("position_ids", None)  # they are this rank's only; the mask already reflects all of them
        asked = others.pop("is_causal", None)
        causal = bool(getattr(module, "is_causal", True) if asked is None else asked)
        causal = causal and attention_mask is None and self._kind == "sdpa"  # `eager` ignores is_causal
        causal = causal and not across

        def attention(call: AttentionCall) -> Tensor:
            view = _ModuleView(module, num_key_value_groups=call.num_groups, is_causal=call.causal)
            biased = others if call.bias is None else others | {"position_bias": call.bias}
            found, _ = own(view, call.query, call.key, call.value, call.mask, is_causal=call.causal, **biased)
            transposed: Tensor = found.transpose(1, 2)
            return transposed

        plain = self._kind == "sdpa" and not others.get("dropout")
        scaling = others.get("scaling")
        scale = (query.shape[-1] ** -0.5 if scaling is None else scaling) if plain else None
        call = AttentionCall(query, key, value, attention_mask, causal, bias)
        if across:
            return attention(_for_own_queries(call, slices)).transpose(1, 2).contiguous(), None
        more = any(isinstance(other, Tensor) for other in others.values()) or hasattr(module, "sinks")
        mixed = sequence_attention(
            call, slices, attention, needs_all_heads=more, scale=None if more or bias is not None else scale
        )
        return mixed.transpose(1, 2).contiguous(), None

    def _own(self, module: nn.Module) -> Callable[..., Any]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self._kind != "eager":
            found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self._kind]
            return found
        eager: Callable[..., Any] = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        return eager


class _ModuleView:
    """A view of a module in which some attributes have other values."""

    def __init__(self, module: nn.Module, **values: object) -> None:
        self.__dict__.update(values, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
