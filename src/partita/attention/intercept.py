"""A module whose attention is computed over a layout in place of its own: what is met while its forward runs."""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from partita.attention.functional import block_sparse
from partita.attention.layout import Layout
from partita.errors import PartitaError

# The layout where it is causal, or not.
Layouts = Callable[[bool], Layout]

# Of the innermost module that is running.
_current: ContextVar["Interception | None"] = ContextVar("interception", default=None)


def current() -> "Interception | None":
    return _current.get()


class Interception:
    """One call of a module: its attention, and whether any was met."""

    def __init__(self, name: str, layouts: Layouts, causal: bool | None) -> None:
        self.name = name
        self.met = False
        self._layouts, self._causal = layouts, causal

    def refuse(self, what: str) -> PartitaError:
        return PartitaError(
            f"attention: '{self.name}' {what}, which the patterns of attention.pattern cannot do; leave the module out "
            "of attention.layers"
        )

    def layout(self, causal: bool) -> Layout:
        """As the configuration says, or else the module."""
        return self._layouts(causal if self._causal is None else self._causal)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, **given: Any) -> Tensor:
        """:func:`block_sparse` over this module's layout, in autocast's dtype."""
        self.met = True
        layout, kind = self.layout(causal), q.device.type
        if not layout.causal and q.shape[2] != k.shape[2]:
            raise self.refuse(f"attends from {q.shape[2]} positions to {k.shape[2]} others (cross-attention)")
        if torch.is_autocast_enabled(kind):
            q, k, v = (x.to(torch.get_autocast_dtype(kind)) for x in (q, k, v))
        with torch.autocast(kind, enabled=False):
            out: Tensor = block_sparse(q, k, v, layout, **given)
        return out

    def dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # grouped heads are told by their numbers
    ) -> Tensor:
        """In place of ``torch.nn.functional.scaled_dot_product_attention``."""
        q, k, v = (x.unsqueeze(1) if x.ndim == 3 else x for x in (query, key, value))
        seen = None if attn_mask is None else self._padding(attn_mask, q.shape[0], k.shape[2])
        if is_causal and q.shape[2] != k.shape[2]:  # torch counts from the first position of both
            raise self.refuse(f"is causal from {q.shape[2]} positions to {k.shape[2]} others")
        out = self.attend(q, k, v, is_causal, seen=seen, dropout=dropout_p, scale=scale)
        return out.reshape(*query.shape[:-1], value.shape[-1])

    def _padding(self, mask: Tensor, num_samples: int, num_keys: int) -> Tensor:
        """[samples, keys] of a mask that says the same to all heads and queries."""
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if mask.ndim > 4 or shape[2] != 1 or not bool((mask.view(shape) == mask.view(shape)[:, :1]).all()):
            raise self.refuse(f"passes a mask of its own, {list(mask.shape)}, that is not one of padded keys")
        if mask.dtype != torch.bool:
            if not bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()):
                raise self.refuse("adds numbers to its scores")
            mask = mask == 0
        return mask.view(shape)[:, 0, 0].expand(num_samples, num_keys)


class _DotProducts(TorchFunctionMode):
    """While it is on, scaled dot products are the interception's, however they are called."""

    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self._interception = interception

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            func = self._interception.dot_product
        elif func is F.multi_head_attention_forward:  # what it calls does not come here
            names = func.__globals__ | {"scaled_dot_product_attention": self._interception.dot_product}
            func = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
        return func(*args, **(kwargs or {}))


class Intercepting:
    """Runs a module's forward with its attention over a layout.

    Args:
        causal: as the configuration says; None: as the module does.
        dot_products: whether it calls torch's scaled dot product; else transformers' interface says what it meets.
    """

    def __init__(self, module: nn.Module, name: str, layouts: Layouts, causal: bool | None, dot_products: bool) -> None:
        self._kind, self._name = type(module).__name__, name
        self._layouts, self._causal, self._dot_products = layouts, causal, dot_products

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        interception = Interception(self._name, self._layouts, self._causal)
        token = _current.set(interception)
        try:
            with _DotProducts(interception) if self._dot_products else nullcontext():
                result = forward(*args, **kwargs)
        finally:
            _current.reset(token)
        if not interception.met:
            raise PartitaError(
                f"attention: '{self._name}' ({self._kind}) computes its attention neither by torch's "
                "scaled_dot_product_attention nor through transformers' attention interface, so it cannot be "
                "intercepted; leave it out of attention.layers, or have it call one of these"
            )
        return result
