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
    """Trains what ``fabric.setup(model, optimizer)`` is given under partita's plan, each model by an engine of its own.

    The loop is the user's: it adds up gradients under ``fabric.no_backward_sync``, divides its loss, and steps its
    schedulers. A model set up without an optimizer is evaluated alone. ``fabric.save`` writes a folder, which loads at
    any stage and on any number of ranks.

    Args:
        config: partita's: a YAML or JSON file, a mapping, a :class:`partita.Config`, or None for all defaults.
        weights: a safetensors file or folder for models that were built on the meta device.
        cluster_environment: who started the processes, where Lightning cannot tell.
        start_method: how Lightning starts the processes of a node, where nobody else has.

    Raises:
        ConfigError: the config is wrong, or has the engine do what Lightning does.
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
        self._held: list[EngineModule] = []
        super().__init__(cluster_environment=cluster_environment, timeout=timeout, start_method=start_method)
        self._ranks = Ranks(self, self._config)
        self._backward_sync_control = _BackwardSync()

    @property
    def engines(self) -> list[Engine]:
        """Those of the models that were set up, in that order."""
        return [held.engine for held in self._held]

    @property
    def precision(self) -> EnginePrecision:
        """Fabric's precision, as the engines compute in it."""
        return self._plugin

    @precision.setter
    def precision(self, given: Precision | None) -> None:
        self._plugin = EnginePrecision(given or Precision(), self._config, self._only)

    # ---------------------------------------------------------------------- begin

    def setup_environment(self) -> None:
        """Join the other processes."""
        super().setup_environment()
        self._ranks.joined("Fabric's loop")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Of the samplers that Lightning makes: ranks with one data coordinate are fed the same samples."""
        return self._ranks.sampler_arguments

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Where ``fabric.init_module`` builds modules: on the host, with ``empty_init`` on the meta device."""
        return torch.device("meta") if empty_init else accelerator.HOST

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: the engine brings to the device what rests there."""

    def setup_module(self, module: nn.Module) -> EngineModule:
        """A model to evaluate alone."""
        return self._hold(start_frozen(module, self.precision.config, self.root_device, self._weights))

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[EngineModule, list[Optimizer], Any]:
        """A model to train with one optimizer. The scheduler stays the loop's to step.

        Raises:
            ConfigError: there are several optimizers.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                f"fabric.setup: got {len(optimizers)} optimizers; PartitaStrategy trains a model with one: give it "
                "several parameter groups, or set each model up by itself"
            )
        settings.check_schedule(self._config, scheduler is not None)
        held = start(module, self.precision.config, optimizers[0], self.root_device, self._weights)
        return self._hold(held), [held.engine.optimizer], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refused.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("fabric.setup_optimizers: set the model up together with it: fabric.setup(model, optimizer)")

    def _hold(self, held: EngineModule) -> EngineModule:
        self._held.append(held)
        return held

    # ---------------------------------------------------------------------- train

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """By the module's engine; by the only one there is where ``fabric.backward`` names no model.

        Raises:
            PartitaError: there are several engines, or none.
        """
        held = self._only() if module is None else module
        assert isinstance(held, EngineModule)
        held.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """The engine's step, after the ``closure`` if there is one; returns what that does."""
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
        """Clip by the global norm in the step that follows; returns the norm before.

        Raises:
            ConfigError: ``norm_type`` is not 2.
            PartitaError: the norm is not finite, with ``error_if_nonfinite``.
        """
        if norm_type != 2:
            raise ConfigError(f"clip_gradients: partita clips by the 2-norm; got norm_type={norm_type}")
        norm = self._of(optimizer).engine.clip_grad_norm(float(max_norm))
        if error_if_nonfinite and not math.isfinite(norm):
            raise PartitaError(
                f"clip_gradients: the norm of the gradients is {norm}; pass error_if_nonfinite=False to leave such an "
                "update out"
            )
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Refused.

        Raises:
            ConfigError: always.
        """
        self.precision.clip_grad_by_value(optimizer, clip_val)

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  (Lightning's name)
    ) -> None:
        """Save the engine whose model or optimizer is in ``state``, and all else there beside it, as the folder
        ``path``; a state without an engine's as an ordinary file.

        Raises:
            PartitaError: there are two engines' in it, it is to be filtered, or it cannot be written.
        """
        engine, others = self._split(state)
        if engine is None:
            super().save_checkpoint(path, state, storage_options, dict(filter or {}))
            return
        if filter or storage_options is not None:
            raise PartitaError(
                "fabric.save: an engine's checkpoint is a whole folder; pass neither filter nor storage_options"
            )
        beside = self._convert_stateful_objects_in_state(others, filter={})
        checkpoints.save(engine, Path(self.broadcast(path)), beside)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Take up a folder that :meth:`save_checkpoint` wrote, or an ordinary file. Without an optimizer in ``state``
        the folder's weights alone.

        Raises:
            PartitaError: it is of another model, or damaged; or a file, and an optimizer is to be loaded.
        """
        wanted = state if isinstance(state, dict) else {"model": state}
        engine, others = self._split(wanted)
        only_model = not any(isinstance(value, Optimizer) for value in wanted.values())
        if engine is not None and not only_model and Path(path).is_file():
            raise PartitaError(
                f"'{path}' is no folder that fabric.save wrote of an engine: an optimizer's states are loaded from "
                "those alone; load the model without the optimizer, or without strategy=PartitaStrategy"
            )
        if engine is None or Path(path).is_file():
            left: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return left
        found = checkpoints.load(engine, Path(path), only_model=only_model, strict=strict, weights_only=weights_only)
        _validate_keys_for_strict_loading(others.keys(), found.keys(), strict=strict)
        for key, value in others.items():
            if key in found and hasattr(value, "load_state_dict"):
                value.load_state_dict(found.pop(key))
            elif key in found:
                wanted[key] = found.pop(key)
        return dict(found)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state dict on rank 0, empty on the others."""
        return self._engine(module).state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Take up rank 0's values."""
        with self._engine(module).gathered(modify=True):
            super().load_module_state_dict(_model(module), state_dict, strict)

    def _split(self, state: dict[str, Any]) -> tuple[Engine | None, dict[str, Any]]:
        """The engine that ``state`` names, by model or optimizer, and what else is in it."""
        found, others = dict[int, Engine](), dict[str, Any]()
        for key, value in state.items():
            engine = next((engine for engine in self.engines if _is_part(value, engine)), None)
            if engine is None:
                others[key] = value
            else:
                found[id(engine)] = engine
        if len(found) > 1:
            raise PartitaError(f"fabric.save, fabric.load: models of {len(found)} engines; name a path for each")
        return next(iter(found.values()), None), others

    # ----------------------------------------------------------------------- which

    def _engine(self, module: nn.Module) -> Engine:
        return next(engine for engine in self.engines if engine.module is _model(module))

    def _of(self, optimizer: Any) -> EngineModule:
        return next(held for held in self._held if held.engine.optimizer is optimizer)

    def _only(self) -> EngineModule:
        trained = [held for held in self._held if held.trains]
        if len(trained) != 1:
            raise PartitaError(
                f"fabric.backward: {len(trained)} models were set up with an optimizer, each has an engine of its own; "
                "name one: fabric.backward(loss, model=model)"
            )
        return trained[0]

    def teardown(self) -> None:
        """End the engines; the models are ordinary modules again."""
        while self._held:
            self._held.pop().close()
        super().teardown()


class _BackwardSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Gradients that rest whole are summed over the ranks at the first backward outside."""
        assert isinstance(module, EngineModule)
        return module.no_sync() if enabled else nullcontext()


def _model(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, EngineModule) else module


def _is_part(value: Any, engine: Engine) -> bool:
    return value is engine.optimizer or (isinstance(value, nn.Module) and _model(value) is engine.module)
