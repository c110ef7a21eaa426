"""Initialization of modules on the ``meta`` device by their own methods."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import ConfigError
from partita.memory import accelerator


def initialize_modules(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], given: Iterable[Tensor], device: torch.device
) -> None:
    """Initialize the parameters and buffers of modules, given with their paths, by the modules' own methods.

    These are ``_init_weights`` of a Hugging Face model, else ``reset_parameters`` of each module. Parameters have
    memory already; buffers on ``meta`` are allocated here. The ``given`` parameters, and buffers that are not on the
    ``meta`` device, keep their values.

    Raises:
        ConfigError: a module has neither method, or a value was not written.
    """
    if accelerator.is_simulated(device) or not modules:  # nothing has values
        return
    buffers = [buffer for _, module in modules for buffer in module._buffers.values() if buffer is not None]
    kept = [(t, t.detach().clone()) for t in (*given, *(buffer for buffer in buffers if not buffer.is_meta))]
    try:
        for path, module in modules:
            _initialize(model, module, path, device, {id(tensor) for tensor, _ in kept})
    finally:
        with torch.no_grad():
            for tensor, values in kept:
                tensor.copy_(values)


def _initialize(model: nn.Module, module: nn.Module, path: str, device: torch.device, kept: Container[int]) -> None:
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = torch.empty_like(buffer, device=device)
    values = {key: value for key, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}
    # Other code initializes parameters without memory.
    fresh = {key: value for key, value in values.items() if not value.is_meta and id(value) not in kept}
    by_model: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)

    def unwritten() -> str | None:
        return next((key for key in fresh if _is_blank(getattr(module, key))), None)  # a buffer may have been replaced

    with torch.no_grad():
        for tensor in fresh.values():
            _blank(tensor)
        if by_model is not None:
            by_model(module)
        if own is not None and (by_model is None or unwritten() is not None):
            own()
        if (blank := unwritten()) is not None:
            raise ConfigError(
                f"'{f'{path}.{blank}' if path else blank}' is on the meta device, and {type(module).__name__} has no "
                "reset_parameters() that initializes it: add that method, or build the model on a real device"
            )


def _blank(tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _is_blank(tensor: Tensor) -> bool:
    """Return whether an element still has the value of :func:`_blank`. A bool tensor has no unused value: False."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())
