"""Caches of keys and values, which are for generation: training does without them."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from partita.sharding.hooks import Hook


class NoCaches:
    """Has models of transformers that train make no cache of keys and values, until it is removed.

    Blocks that run again in backward would fill it twice, and ranks that have slices of a sequence differ in it. Who
    gives a cache, or asks for one (``use_cache=True``), has it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._handles = list[RemovableHandle]()
        for module in (module for module in model.modules() if hasattr(module, "config")):
            names = list(inspect.signature(type(module).forward).parameters)[1:]
            if "use_cache" in names:
                hook = Hook(partial(_without_cache, names.index("use_cache")))
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Have the models make caches as their configurations say."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _without_cache(position: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    trains = module.training and torch.is_grad_enabled()
    asked = len(args) > position or kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None
    return (args, kwargs | {"use_cache": False}) if trains and not asked else None
