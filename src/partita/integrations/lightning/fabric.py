"""The strategy for Lightning Fabric."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl, _validate_keys_for_strict_loading
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from partita.checkpoint.settings import apply_rates
from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.errors import ConfigError, PartitaError
from partita.integrations.lightning import checkpoint as checkpoints
from partita.integrations.lightning import settings
from partita.integrations.lightning.module import EngineModule, start, start_frozen
from partita.integrations.lightning.precision import EnginePrecision
from partita.integrations.lightning.ranks import Ranks
from partita.integrations.lightning.trainer import StartMethod
from partita.memory import accelerator


class PartitaStrategy(DDPStrategy):
    """A Fabric strategy that creates an engine for each model passed to ``fabric.setup(model, optimizer)``.

    The user's loop accumulates gradients under ``fabric.no_backward_sync``, divides its loss, and steps its schedulers.
    A model that is set up without an optimizer is only evaluated. ``fabric.save`` writes a folder, which loads at any
    stage and on any number of ranks.

    Args:
        config: partita's config: a YAML or JSON file, a mapping, a :class:`partita.Config`, or None for all defaults.
        weights: a safetensors file or folder for models that were built on the meta device.
        cluster_environment: the launcher of the processes, if Lightning cannot detect it.
        start_method: how Lightning starts the processes of a node, if no launcher has started them.

    Raises:
        ConfigError: the config is wrong, or sets something that Lightning controls.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        *,
        weights: str | Path | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        start_method: StartMethod = "popen",
    ) -> None:
        self._config = settings.with_accumulation(settings.read(config), 1, "a step of Fabric's loop")
        timeout = timedelta(seconds=self._config.communication.timeout_s)
        self._weights = None if weights is None else str(weights)
        self._engine_modules: list[EngineModule] = []
        super().__init__(cluster_environment=cluster_environment, timeout=timeout, start_method=start_method)
        self._ranks = Ranks(self, self._config)
        self._backward_sync_control = _BackwardSync()

    @property
    def engines(self) -> list[Engine]:
        """The engines of the models that were set up, in setup order."""
        return [each.engine for each in self._engine_modules]

    @property
    def precision(self) -> EnginePrecision:
        """Fabric's precision plugin, adapted to the engines."""
        return self._plugin

    @precision.setter
    def precision(self, given: Precision | None) -> None:
        self._plugin = EnginePrecision(given or Precision(), self._config, self._only)

    # ---------------------------------------------------------------------- begin

    def setup_environment(self) -> None:
        """Connect to the other processes."""
        super().setup_environment()
        self._ranks.joined("Fabric's loop")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Sampler arguments for Lightning; ranks with the same data coordinate read the same samples."""
        return self._ranks.sampler_arguments

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return the device on which ``fabric.init_module`` builds modules: the host, or meta with ``empty_init``."""
        return torch.device("meta") if empty_init else accelerator.HOST

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the engine moves what is stored on the device."""

    def setup_module(self, module: nn.Module) -> EngineModule:
        """Set up a model that is only evaluated."""
        return self._add(start_frozen(module, self.precision.config, self.root_device, self._weights))

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[EngineModule, list[Optimizer], Any]:
        """Set up a model to train with one optimizer. The user's loop still steps the scheduler.

        Raises:
            ConfigError: there are several optimizers.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                f"fabric.setup: got {len(optimizers)} optimizers; PartitaStrategy trains a model with one: use several "
                "parameter groups, or call fabric.setup for each model"
            )
        settings.check_schedule(self._config, scheduler is not None)
        engine_module = start(module, self.precision.config, optimizers[0], self.root_device, self._weights)
        return self._add(engine_module), [engine_module.engine.optimizer], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse to set up an optimizer without its model.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("fabric.setup_optimizers: set up model and optimizer: fabric.setup(model, optimizer)")

    def _add(self, engine_module: EngineModule) -> EngineModule:
        self._engine_modules.append(engine_module)
        return engine_module

    # ---------------------------------------------------------------------- train

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run backward with the module's engine; without a module, with the only engine that trains.

        Raises:
            PartitaError: no module is given, and several engines train, or none.
        """
        engine_module = self._only() if module is None else module
        assert isinstance(engine_module, EngineModule)
        engine_module.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the ``closure`` if there is one, step the engine, and return the closure's result."""
        closure: Callable[[], Any] | None = kwargs.get("closure")
        output = closure() if closure is not None else None
        self._of(optimizer).step()
        return output

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients by their global norm in the next step; return the norm before clipping.

        Raises:
            ConfigError: ``norm_type`` is not 2.
            PartitaError: the norm is not finite, with ``error_if_nonfinite``.
        """
        if norm_type != 2:
            raise ConfigError(f"clip_gradients: partita clips by the 2-norm; got norm_type={norm_type}")
        norm = self._of(optimizer).engine.clip_grad_norm(float(max_norm))
        if error_if_nonfinite and not math.isfinite(norm):
            raise PartitaError(
                f"clip_gradients: the norm of the gradients is {norm}; pass error_if_nonfinite=False to skip such "
                "updates"
            )
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Refuse to clip gradients by value.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"clip_gradients: clip_val={clip_val} clips by value, but partita clips gradients only by their global "
            "norm: pass max_norm"
        )

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  (Lightning's name)
    ) -> None:
        """Save ``state``: as a folder if it contains an engine's model or optimizer, else as an ordinary file.

        The folder is a checkpoint of the engine, with the other entries of ``state`` in it.

        Raises:
            PartitaError: ``state`` has models of two engines, an engine's state is to be filtered, or the checkpoint
                cannot be written.
        """
        engine, others = self._split(state)
        if engine is None:
            super().save_checkpoint(path, state, storage_options, dict(filter or {}))
            return
        if filter or storage_options is not None:
            raise PartitaError(
                "fabric.save: an engine's checkpoint is a folder with its full state; pass neither filter nor "
                "storage_options"
            )
        converted = self._convert_stateful_objects_in_state(others, filter={})
        checkpoints.save(engine, Path(self.broadcast(path)), converted)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a folder that :meth:`save_checkpoint` wrote, or an ordinary file.

        Without an optimizer in ``state``, only the weights in a folder are loaded.

        Raises:
            PartitaError: the checkpoint is of another model, or damaged; or it is a file, and an optimizer is to be
                loaded.
        """
        wanted = state if isinstance(state, dict) else {"model": state}
        engine, others = self._split(wanted)
        only_model = not any(isinstance(value, Optimizer) for value in wanted.values())
        if engine is not None and not only_model and Path(path).is_file():
            raise PartitaError(
                f"'{path}' is not a folder that fabric.save wrote for an engine, so it has no optimizer states to "
                "load: load the model without the optimizer, or without strategy=PartitaStrategy"
            )
        if engine is None or Path(path).is_file():
            remaining: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return remaining
        found, changed = checkpoints.load(
            engine, Path(path), only_model=only_model, strict=strict, weights_only=weights_only
        )
        _validate_keys_for_strict_loading(others.keys(), found.keys(), strict=strict)
        for key, value in others.items():
            if key in found and hasattr(value, "load_state_dict"):
                value.load_state_dict(found.pop(key))
                if isinstance(value, LRScheduler) and _optimizer_of(value) is engine.optimizer:
                    apply_rates(changed, engine.optimizer, value)
            elif key in found:
                wanted[key] = found.pop(key)
        return dict(found)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the full state dict on rank 0; empty on other ranks."""
        return self._engine(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load rank 0's values on every rank."""
        with self._engine(module).gathered(modify=True):
            super().load_module_state_dict(_model(module), state_dict, strict)

    def _split(self, state: dict[str, Any]) -> tuple[Engine | None, dict[str, Any]]:
        """Split ``state`` into the engine whose model or optimizer it contains (None: none), and the other entries."""
        found, others = dict[int, Engine](), dict[str, Any]()
        for key, value in state.items():
            engine = next((engine for engine in self.engines if _belongs_to(value, engine)), None)
            if engine is None:
                others[key] = value
            else:
                found[id(engine)] = engine
        if len(found) > 1:
            raise PartitaError(f"fabric.save, fabric.load: models of {len(found)} engines; name a path for each")
        return next(iter(found.values()), None), others

    # ---------------------------------------------------------------------- lookup

    def _engine(self, module: nn.Module) -> Engine:
        return next(engine for engine in self.engines if engine.module is _model(module))

    def _of(self, optimizer: Any) -> EngineModule:
        return next(each for each in self._engine_modules if each.engine.optimizer is optimizer)

    def _only(self) -> EngineModule:
        trained = [each for each in self._engine_modules if each.trains]
        if len(trained) != 1:
            raise PartitaError(
                f"fabric.backward: {len(trained)} models were set up with an optimizer, and each has its own engine: "
                "name one: fabric.backward(loss, model=model)"
            )
        return trained[0]

    def teardown(self) -> None:
        """Close the engines; the models are ordinary modules again."""
        while self._engine_modules:
            self._engine_modules.pop().close()
        super().teardown()


class _BackwardSync(_BackwardSyncControl):
    """Implementation of ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context that skips gradient reduction if gradients are stored unsharded.

        The next backward outside reduces them.
        """
        assert isinstance(module, EngineModule)
        return module.no_sync() if enabled else nullcontext()


def _model(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, EngineModule) else module


def _optimizer_of(scheduler: LRScheduler) -> Any:
    """Return the optimizer of a scheduler, without Fabric's wrapper."""
    return getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)


def _belongs_to(value: Any, engine: Engine) -> bool:
    return value is engine.optimizer or (isinstance(value, nn.Module) and _model(value) is engine.module)
