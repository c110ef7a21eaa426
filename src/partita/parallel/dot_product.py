"""Interception of ``scaled_dot_product_attention``: the arguments of a call, and a mode that replaces the function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class DotProduct:
    """The arguments of ``torch.nn.functional.scaled_dot_product_attention``, under its names.

    Shapes: ``query`` ``[..., queries, size]``, ``key`` and ``value`` ``[..., keys, size]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


AttentionFunction = Callable[[DotProduct], Tensor]
_override: ContextVar[AttentionFunction | None] = ContextVar("_ahead", default=None)


@contextmanager
def override_sdpa(compute: AttentionFunction) -> Iterator[None]:
    """Compute every ``scaled_dot_product_attention`` in the ``with`` block by ``compute``.

    This takes precedence over every other :class:`ReplaceSdpa`, also over those that are entered later.
    """
    token = _override.set(compute)
    try:
        with ReplaceSdpa(compute):
            yield
    finally:
        _override.reset(token)


class ReplaceSdpa(TorchFunctionMode):
    """Mode in which ``compute`` computes ``scaled_dot_product_attention``, also inside
    ``multi_head_attention_forward``.
    """

    def __init__(self, compute: AttentionFunction) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._called(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:  # its own call of scaled_dot_product_attention bypasses this mode
            names = func.__globals__ | {"scaled_dot_product_attention": self._called}
            func = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
        return func(*args, **(kwargs or {}))

    def _called(self, *args: Any, **kwargs: Any) -> Tensor:
        return (_override.get() or self._compute)(DotProduct(*args, **kwargs))
