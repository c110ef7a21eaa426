"""Caches of keys and values in transformers models: they serve generation, and training runs without them."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.sharding.hooks import Hook


class NoCaches:
    """Makes models of transformers train without a cache of keys and values, until it is removed.

    Blocks that run again in backward would fill it twice, and ranks with slices of a sequence differ in it. Besides,
    transformers separates packed documents (``position_ids`` that begin anew) only without a cache, so the loss would
    depend on which meshes have one. A cache that is given, or asked for (``use_cache=True``), is used.

    Args:
        warns: say once if the first samples that have ``position_ids`` are packed documents that are not separated.
    """

    def __init__(self, model: nn.Module, *, warns: bool = False) -> None:
        self._handles = list[RemovableHandle]()
        self._warns = warns
        for module in (module for module in model.modules() if hasattr(module, "config")):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            if "use_cache" in names:
                hook = Hook(partial(self._without_cache, names))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Let the models make caches again, as their configurations say."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _without_cache(self, names: Sequence[str], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return None
        position = names.index("use_cache")
        asked = len(args) > position or kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
        if self._warns and not torch.compiler.is_compiling():
            self._look_at({**dict(zip(names, args, strict=False)), **kwargs})
        return None if asked else (args, kwargs | {"use_cache": False})

    def _look_at(self, given: Mapping[str, Any]) -> None:
        """Warn if documents are packed, and a mask or a cache keeps transformers from separating them."""
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.device.type == "meta":
            return
        self._warns = False
        has_mask = isinstance(mask, Tensor) and mask.dim() == 2
        has_cache = mask is None and bool(given.get("use_cache") or given.get("past_key_values") is not None)
        if (has_mask or has_cache) and given.get("cu_seq_lens_q") is None and _begins_anew(positions, mask):
            named = "an attention_mask [samples, positions]" if has_mask else "a cache (use_cache=True)"
            remedy = "pass no attention_mask, or one of 4 dims" if has_mask else "pass use_cache=False"
            warnings.warn(
                f"position_ids begin anew inside a sample, as those of packed documents do, but with {named} "
                f"transformers does not separate the documents: they attend to each other; {remedy}",
                stacklevel=2,
            )


def _begins_anew(positions: Tensor, mask: Tensor | None) -> bool:
    """True if positions go back between two tokens of a sample, neither of which is padding."""
    back = positions.diff(dim=1) < 0
    if mask is not None and mask.shape[1] == positions.shape[1]:
        back = back & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(back.any())
