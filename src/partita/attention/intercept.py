"""Interception of a module's attention: attention calls during its forward are computed over a layout."""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from partita.attention.functional import block_sparse
from partita.attention.layout import Layout
from partita.errors import PartitaError
from partita.memory.autocast import autocast_dtype, no_autocast
from partita.parallel.dot_product import DotProduct, override_sdpa
from partita.parallel.sequence.attention import current_slices
from partita.parallel.tensor.dropout import kernel_rng
from partita.sharding.compiler import eager_itself

# Returns the causal or the bidirectional layout.
Layouts = Callable[[bool], Layout]

# The interception of the innermost running module.
_current: ContextVar["Interception | None"] = ContextVar("interception", default=None)


def current() -> "Interception | None":
    return _current.get()


class Interception:
    """One call of a module: computes its attention over the layout, and records in ``attention_called`` that it was
    called.
    """

    def __init__(self, name: str, layouts: Layouts, causal: bool | None) -> None:
        self.name = name
        self.attention_called = False
        self._layouts = layouts
        self._causal = causal

    def unsupported(self, what: str) -> PartitaError:
        return PartitaError(
            f"attention: '{self.name}' {what}, which the patterns of attention.pattern cannot do; leave the module out "
            "of attention.layers"
        )

    def layout(self, causal: bool) -> Layout:
        """Return the layout. ``causal`` is the module's choice, which the config may override."""
        return self._layouts(causal if self._causal is None else self._causal)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **given: Any) -> Tensor:
        """Compute :func:`block_sparse` over this module's layout, in the dtype of autocast."""
        self.attention_called = True
        layout = self.layout(causal)
        if not layout.causal and q.shape[2] != k.shape[2]:
            raise self.unsupported(f"attends from {q.shape[2]} positions to {k.shape[2]} others (cross-attention)")
        if (dtype := autocast_dtype(q.device)) is not None:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        with no_autocast(q.device), kernel_rng(q.device) if given.get("dropout") else nullcontext():
            out: Tensor = block_sparse(q, k, v, layout, **given)
        return out

    def dot_product(self, call: DotProduct) -> Tensor:
        """Compute ``scaled_dot_product_attention``, also for tensors without a heads dim."""
        q, k, v = (x.unsqueeze(1) if x.ndim == 3 else x for x in (call.query, call.key, call.value))
        slices = current_slices()
        num_keys = k.shape[2] if slices is None else slices.length
        seen = None if call.attn_mask is None else self._padding(call.attn_mask, q.shape[0], num_keys)
        if call.is_causal and q.shape[2] != k.shape[2]:  # torch aligns the first query with the first key
            raise self.unsupported(f"is causal from {q.shape[2]} positions to {k.shape[2]} others")
        out = self.compute(q, k, v, call.is_causal, seen=seen, dropout=call.dropout_p, scale=call.scale)
        return out.reshape(*call.query.shape[:-1], call.value.shape[-1])

    def _padding(self, mask: Tensor, num_samples: int, num_keys: int) -> Tensor:
        """Return the padding [samples, keys] in a mask that is the same for all heads and queries."""
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if mask.ndim > 4 or shape[2] != 1 or not bool((mask.view(shape) == mask.view(shape)[:, :1]).all()):
            raise self.unsupported(f"passes a mask of its own, {list(mask.shape)}, that is not one of padded keys")
        if mask.dtype != torch.bool:
            if not bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()):
                raise self.unsupported("adds numbers to its scores")
            mask = mask == 0
        return mask.view(shape)[:, 0, 0].expand(num_samples, num_keys)


class InterceptAttention:
    """Wrapper that runs a module's forward with its attention over a layout.

    Args:
        causal: the config's choice; None: the module decides.
        dot_products: the module calls ``scaled_dot_product_attention``; otherwise it calls transformers' interface.
    """

    def __init__(self, module: nn.Module, name: str, layouts: Layouts, causal: bool | None, dot_products: bool) -> None:
        self._kind = type(module).__name__
        self._name = name
        self._layouts = layouts
        self._causal = causal
        self._dot_products = dot_products

    @eager_itself
    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        interception = Interception(self._name, self._layouts, self._causal)
        token = _current.set(interception)
        try:
            with override_sdpa(interception.dot_product) if self._dot_products else nullcontext():
                result = forward(*args, **kwargs)
        finally:
            _current.reset(token)
        if not interception.attention_called:
            raise PartitaError(
                f"attention: '{self._name}' ({self._kind}) computes its attention neither by torch's "
                "scaled_dot_product_attention nor through transformers' attention interface, so it cannot be "
                "intercepted; leave it out of attention.layers, or have it call one of these"
            )
        return result
