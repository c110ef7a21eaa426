"""Caches of keys and values in transformers models: training runs without them, they are for generation."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.sharding.hooks import Hook

# The warning about packed documents of a running forward, until its attention shows whether it separates them itself.
_pending_warning: ContextVar[str | None] = ContextVar("_pending_warning", default=None)


class NoCaches:
    """Makes transformers models train without a cache of keys and values, until :meth:`remove`.

    Recomputed blocks would fill the cache twice, and it does not support slices of a sequence. Also, transformers
    separates packed documents (``position_ids`` that restart at 0) only without a cache, so the loss would depend on
    the mesh. A cache that is passed, or requested by ``use_cache=True``, is used.

    Args:
        warns: warn if the first batch with ``position_ids`` has packed documents that are not separated.
        is_intercepted: partita computes the model's attention, which calls :func:`end_packing_warning`.
    """

    def __init__(self, model: nn.Module, *, warns: bool = False, is_intercepted: bool = False) -> None:
        self._handles = list[RemovableHandle]()
        self._warns = warns
        self._is_intercepted = is_intercepted
        for module in (module for module in model.modules() if hasattr(module, "config")):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            if "use_cache" in names:
                hook = Hook(partial(self._without_cache, names))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks: the models use caches again, as their configs say."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _without_cache(self, names: Sequence[str], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        position = names.index("use_cache")
        requested = (
            len(args) > position or kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
        )
        if self._warns and not torch.compiler.is_compiling():
            self._warn_if_packed({**dict(zip(names, args, strict=False)), **kwargs})
        return None if requested else (args, kwargs | {"use_cache": False})

    def _warn_if_packed(self, arguments: Mapping[str, Any]) -> None:
        """Warn if documents are packed, and a mask or a cache prevents transformers from separating them."""
        positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.device.type == "meta":
            return
        self._warns = False
        has_mask = isinstance(mask, Tensor) and mask.dim() == 2
        has_cache = mask is None and bool(arguments.get("use_cache") or arguments.get("past_key_values") is not None)
        if (has_mask or has_cache) and arguments.get("cu_seq_lens_q") is None and _restarts(positions, mask):
            named = "an attention_mask [samples, positions]" if has_mask else "a cache (use_cache=True)"
            remedy = "pass no attention_mask, or one of 4 dims" if has_mask else "pass use_cache=False"
            _pending_warning.set(
                f"position_ids restart inside a sample, as in packed documents, but with {named} transformers does not "
                f"separate the documents, and they attend to each other; {remedy}"
            )
            if not self._is_intercepted:
                end_packing_warning(is_separated=False)


def end_packing_warning(is_separated: bool) -> None:
    """Emit the pending warning about packed documents, unless the attention itself separates them."""
    if (message := _pending_warning.get()) is not None:
        _pending_warning.set(None)
        if not is_separated:
            warnings.warn(message, stacklevel=2)


def _restarts(positions: Tensor, mask: Tensor | None) -> bool:
    """Return whether positions decrease between two tokens of a sample that are not padding."""
    back = positions.diff(dim=1) < 0
    if mask is not None and mask.shape[1] == positions.shape[1]:
        back = back & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(back.any())
