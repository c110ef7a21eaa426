"""A model under an engine, as Lightning's strategies hold it."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import nn
from torch.optim import Optimizer

from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.engine.start import initialize


class EngineModule(nn.Module):
    """What Lightning calls in place of the model, which it reaches through the model's own call.

    So ``training_step`` and others run inside the model's forward (Lightning puts them in its place for that call),
    where parameters of the model's own are whole.

    Attributes: ``engine``, its ``module``, and whether it ``trains`` that.
    """

    def __init__(self, engine: Engine, trains: bool) -> None:
        super().__init__()
        self.engine, self.trains = engine, trains
        self.module = engine.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.engine(*args, **kwargs)

    @property
    def adds_locally(self) -> bool:
        """Whether gradients of several backwards cost no more memory when they are summed over the ranks at the last."""
        return all(bool(row.grad_between.partial_axes) for row in self.engine.plan.values())


def start(
    model: nn.Module, config: Config, optimizer: Optimizer | None, device: torch.device, weights: str | None
) -> EngineModule:
    """Put the model under an engine that trains it on ``device``."""
    return EngineModule(_engine(model, config, optimizer, device, weights), trains=True)


def start_frozen(model: nn.Module, config: Config, device: torch.device, weights: str | None) -> EngineModule:
    """The same to evaluate alone: without gradients and optimizer states."""
    trained = [param for param in model.parameters() if param.requires_grad]
    _require_gradients(trained, False)
    try:
        return EngineModule(_engine(model, config, None, device, weights), trains=False)
    finally:
        _require_gradients(trained, True)


def _engine(
    model: nn.Module, config: Config, optimizer: Optimizer | None, device: torch.device, weights: str | None
) -> Engine:
    _move_others(model, device)
    engine = initialize(model, config, optimizer=optimizer, weights=weights, device=device)
    _update_properties(model, device=device)
    return engine


def _require_gradients(params: Iterable[nn.Parameter], wanted: bool) -> None:
    for param in params:
        param.requires_grad_(wanted)


def _move_others(model: nn.Module, device: torch.device) -> None:
    """Bring modules without parameters (metrics, ...) to the device; those with parameters are the engine's to move."""
    for module in model.children():
        if any(True for _ in module.parameters()):
            _move_others(module, device)
        elif not any(buffer.is_meta for buffer in module.buffers()):
            module.to(device)
