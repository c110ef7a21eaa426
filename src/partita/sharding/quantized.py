"""Frozen quantized parameters: they belong to no unit, and stay unsharded where they are, with rank 0's values."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.comm.group import Group
from partita.layout.parameters import ParameterInfo, inner_names


def describe(info: ParameterInfo) -> str:
    """Describe the properties that must be equal on all ranks."""
    held = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors_in(info.param))
    return f"quantized parameter '{info.fqns[0]}', a {type(info.param).__name__} of {held}"


@torch.no_grad()
def broadcast_quantized(infos: Sequence[ParameterInfo], group: Group, device: torch.device) -> None:
    """Broadcast the first rank's values in the group."""
    own = [tensor for info in infos for tensor in tensors_in(info.param)]
    sent = [tensor.to(device) for tensor in own]  # a scale may be on the host
    group.broadcast(sent, "start")
    for tensor, values in zip(own, sent, strict=True):
        if values is not tensor:
            tensor.copy_(values)


def tensors_in(param: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors of a quantized parameter: its values, and their scales."""
    names = inner_names(param)
    for name in names:
        yield from tensors_in(getattr(param, name))
    if not names:
        yield param.data
        for value in vars(param).values():
            yield from _tensors_of(value)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an attribute of a parameter, such as the scales of bitsandbytes."""
    if isinstance(value, Tensor):
        yield value.data
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        for inner in vars(value).values():
            yield from _tensors_of(inner)
