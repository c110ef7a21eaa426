"""The precision plugin of Lightning's strategies, implemented by the engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer

from partita.config.schema import Config
from partita.errors import ConfigError
from partita.integrations.lightning.module import EngineModule
from partita.integrations.lightning.settings import with_precision


class EnginePrecision(Precision):
    """A precision plugin that replaces the one that Lightning created from its ``precision`` argument.

    The engine keeps fp32 master weights, casts parameters and scales the loss, so modules are not converted. The given
    plugin still converts inputs and outputs. Its forward context is used for precisions that are not mixed, and under
    autocast (``precision.compute: fp32`` with a mixed precision).

    Attributes: ``config``, with the dtype of the precision.

    Args:
        current: returns the module of the current engine.

    Raises:
        ConfigError: the config sets another dtype.
    """

    def __init__(self, given: FabricPrecision, config: Config, current: Callable[[], EngineModule]) -> None:
        self.precision = given.precision
        self._given = given
        self._current = current
        self.config, autocasts = with_precision(config, given.precision)
        self._enters = autocasts or not given.precision.endswith("-mixed")

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the context for the model's forward and Lightning's steps."""
        context: AbstractContextManager[None] = self._given.forward_context() if self._enters else nullcontext()
        return context

    def convert_input(self, data: Any) -> Any:
        """Convert a batch as the given plugin does."""
        return self._given.convert_input(data)

    def convert_output(self, data: Any) -> Any:
        """Convert Fabric's outputs as the given plugin does: to fp32."""
        return self._given.convert_output(data)

    def backward(
        self, tensor: Tensor, model: LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run the engine's backward, or the LightningModule's if it overrides ``backward``.

        Raises:
            PartitaError: the module overrides it under fp16: its backward would miss the loss scale.
        """
        if is_overridden("backward", model):
            with self._current().direct_backward():
                model.backward(tensor, *args, **kwargs)
        else:
            self._current().backward(tensor, *args, **kwargs)

    def optimizer_step(
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure (forward and backward), Lightning's hooks before the step, and the engine's step."""
        output = self._wrap_closure(model, optimizer, closure)
        self._current().step()
        return output

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the batch's gradients by their global norm in the next step."""
        self._current().engine.clip_grad_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Refuse to clip gradients by value.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("partita clips gradients only by their global norm: pass gradient_clip_algorithm='norm'")
