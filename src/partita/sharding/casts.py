"""Dtypes at the borders: the model's floating-point inputs, and the modules that stay in fp32."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from partita.sharding.nested import map_tensors


def cast_borders(model: nn.Module, compute: torch.dtype, kept: set[int]) -> list[RemovableHandle]:
    """Let the ``kept`` modules work in fp32 in a model that computes in ``compute``, until the hooks are removed."""
    if compute == torch.float32:
        return []
    hooks = list[RemovableHandle]()
    for module in {id(module): module for module in _outermost(model, kept)}.values():
        hooks.append(module.register_forward_pre_hook(_to_fp32, with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda _, __, output: map_floats(output, compute)))
    return hooks


def _outermost(module: nn.Module, kept: set[int]) -> Iterator[nn.Module]:
    """The kept modules that are called by modules that are not: between those inside, values stay in fp32."""
    if id(module) in kept and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, kept)


def _to_fp32(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return map_floats(args, torch.float32), map_floats(kwargs, torch.float32)


def map_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(value, cast)
