"""The module of Lightning's strategies: a model with its engine."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.engine.start import initialize
from partita.errors import PartitaError


class EngineModule(nn.Module):
    """The module that Lightning calls in place of the model; it calls the model's own forward.

    Lightning replaces the forward by ``training_step`` and other steps for a call, so they run inside the model's
    forward hooks, where parameters that belong directly to the model are unsharded.

    Attributes: ``engine``; ``module``, its model; ``trains``, True if the engine trains it.

    Args:
        dtypes: the original dtypes of the model's parameters and buffers, by name.
    """

    def __init__(self, engine: Engine, trains: bool, dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        self.engine = engine
        self.trains = trains
        self.module = engine.module
        self._dtypes = dtypes
        self._has_gradients = False
        self._optimizer_class = type(engine.optimizer)
        # Lightning derives the class of its wrapper around an optimizer from the optimizer's class.
        own = {"zero_grad": lambda optimizer, set_to_none=True: self.zero_grad(set_to_none)}
        engine.optimizer.__class__ = type(self._optimizer_class.__name__, (self._optimizer_class,), own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.engine(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward, or the loss's own if arguments (``retain_graph``, ...) are given.

        Raises:
            PartitaError: arguments are given under fp16: the loss's own would miss the loss scale.
        """
        if args or kwargs:
            with self.direct_backward():
                loss.backward(*args, **kwargs)
        else:
            self._has_gradients = True
            self.engine.backward(loss)

    @contextmanager
    def direct_backward(self) -> Iterator[None]:
        """Allow a backward that bypasses ``engine.backward`` inside the block.

        Raises:
            PartitaError: the engine computes in fp16: this backward would miss the loss scale.
        """
        if self.engine.config.precision.compute == "fp16":
            raise PartitaError(
                "a custom backward of the module, or one with arguments (retain_graph=True), would miss the loss scale "
                "of fp16: compute in bf16 (precision='bf16-mixed'), or use Lightning's backward"
            )
        self._has_gradients = True
        yield

    def step(self) -> None:
        """Step the engine."""
        self.engine.step()
        self._has_gradients = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients since the last step; the engine stores them, not ``.grad``."""
        if self._has_gradients:
            self.engine.zero_grad()
            self._has_gradients = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for backwards other than the last one of a batch.

        It postpones the reduction of gradients that are stored unsharded to the last backward. For sharded gradients it
        has no effect, because unsharded ones would take the memory that sharding saves.
        """
        unsharded = all(bool(row.grad_between.partial_axes) for row in self.engine.plan.values())
        return self.engine.no_sync() if unsharded else nullcontext()

    def close(self) -> None:
        """Close the engine, and restore the ordinary model, with its original dtypes, and optimizer.

        Raises:
            PartitaError: the unsharded model does not fit into memory; the engine stays open.
        """
        self.engine.close(whole=True, dtypes=self._dtypes)
        for name, buffer in self.module.named_buffers():
            buffer.data = buffer.to(self._dtypes.get(name, buffer.dtype))
        self._release()

    def fail(self, error: BaseException) -> None:
        """Close the engine because of an error on this rank, and report it to the ranks that wait for this one."""
        self.engine.__exit__(type(error), error, error.__traceback__)
        self._release()

    def _release(self) -> None:
        self.engine.optimizer.__class__ = self._optimizer_class


def start(
    model: nn.Module, config: Config, optimizer: Optimizer | None, device: torch.device, weights: str | None
) -> EngineModule:
    """Create an engine that trains the model on ``device``."""
    dtypes = _dtypes(model)
    return EngineModule(_engine(model, config, optimizer, device, weights), trains=True, dtypes=dtypes)


def start_frozen(model: nn.Module, config: Config, device: torch.device, weights: str | None) -> EngineModule:
    """Create an engine that only evaluates the model, without gradients and optimizer states."""
    dtypes = _dtypes(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    _require_gradients(trained, False)
    try:
        return EngineModule(_engine(model, config, None, device, weights), trains=False, dtypes=dtypes)
    finally:
        _require_gradients(trained, True)


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of all parameters and buffers, by name."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.dtype for name, tensor in tensors}


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
    """Move modules without parameters (metrics, ...) to the device; the engine moves those with parameters."""
    for module in model.children():
        if any(True for _ in module.parameters()):
            _move_others(module, device)
        elif not any(buffer.is_meta for buffer in module.buffers()):
            module.to(device)
