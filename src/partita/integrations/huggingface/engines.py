"""The engines behind an accelerator: one per model, on one mesh."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from partita.config.load import load_config
from partita.config.schema import Config
from partita.engine.engine import Engine
from partita.engine.start import initialize
from partita.errors import ConfigError, PartitaError
from partita.integrations.huggingface.arguments import merged
from partita.integrations.huggingface.generation import unhook_generation
from partita.integrations.huggingface.prepared import PreparedModel
from partita.integrations.huggingface.saving import hook_saving, unhook_saving

# The attribute of a model that refers to the owner of its engine: another trainer may have trained the model.
_OWNER = "_partita_holder"
_COMPUTE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class ConstantRates(LRScheduler):
    """A schedule that does not change learning rates, because the training loop steps its own scheduler."""

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


class Engines:
    """Creates and finds the engines of models.

    Args:
        config: the config of every engine, with the trainer's values.
        compute: ``precision.compute``; None: the dtype of each model's parameters.
        device: the device of every engine.
        has_scheduler: the training loop always has a scheduler; else engines step the schedule in the config.
    """

    def __init__(self, config: Config, compute: str | None, device: torch.device, *, has_scheduler: bool) -> None:
        self._config = config
        self._compute = compute
        self._device = device
        self._has_scheduler = has_scheduler
        self._prepared = dict[int, PreparedModel]()

    def __iter__(self) -> Iterator[PreparedModel]:
        return iter(self._prepared.values())

    def of(self, model: Any) -> PreparedModel | None:
        """Return the :class:`PreparedModel` of a model, compiled or not; None if the model has no engine."""
        return self._prepared.get(_key(model))

    def with_optimizer(self, optimizer: Optimizer) -> PreparedModel | None:
        """Return the :class:`PreparedModel` whose engine steps this optimizer; None if there is none."""
        return next((one for one in self._training if one.engine.optimizer is optimizer), None)

    def with_parameters(self, parameters: Iterable[nn.Parameter], call: str) -> PreparedModel | None:
        """Return the :class:`PreparedModel` whose model trains these parameters; None if they belong to no engine.

        Raises:
            PartitaError: they are only some of the parameters that the model trains.
        """
        wanted = {id(parameter) for parameter in parameters}
        for one in self._training:
            trained = {name: id(p) for name, p in one.engine.module.named_parameters() if p.requires_grad}
            if wanted.isdisjoint(trained.values()):
                continue
            if missing := [name for name, found in trained.items() if found not in wanted]:
                raise PartitaError(
                    f"{call}: gradients are clipped by the norm of an engine's full model: expected all parameters "
                    f"that train, '{missing[0]}' is missing; pass model.parameters()"
                )
            return one
        return None

    def the_trained(self) -> PreparedModel | None:
        """Return the only :class:`PreparedModel` that trains; None if there are none or several."""
        found = self._training
        return found[0] if len(found) == 1 else None

    @property
    def _training(self) -> list[PreparedModel]:
        return [one for one in self._prepared.values() if one.trains]

    @property
    def _steps_schedule(self) -> bool:
        return bool(self._config.schedule.model_fields_set) and not self._has_scheduler

    def omit_section(self, section: str) -> None:
        """Remove a section of the config for later engines, because the training loop handles it."""
        self._config = load_config(self._config.model_dump(exclude_unset=True, exclude={section}))

    def train(self, model: nn.Module, optimizer: Optimizer) -> PreparedModel:
        """Create an engine for a model and the optimizer of its parameters."""
        return self._add(model, optimizer)

    def freeze(self, model: nn.Module) -> PreparedModel:
        """Create an engine for a model that is only evaluated; its parameters no longer require gradients."""
        model.requires_grad_(False)
        return self._add(model, None)

    def _add(self, model: nn.Module, optimizer: Optimizer | None) -> PreparedModel:
        self._take_over(model)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
        first = next(iter(self._prepared.values()), None)
        engine = initialize(
            model,
            merged(self._config, {"precision.compute": self._compute or _compute_of(model)}),
            optimizer=optimizer,
            scheduler=None if optimizer is not None and self._steps_schedule else ConstantRates,
            mesh=first.engine.mesh if first is not None else None,
            device=self._device,
        )
        made = self._prepared[_key(model)] = PreparedModel(engine, optimizer is not None, dtypes)
        setattr(model, _OWNER, EngineOwner(self))
        hook_saving(made)
        return made

    def _take_over(self, model: nn.Module) -> None:
        """Close the engine with which another trainer has trained the model, and unshard the model.

        Raises:
            ConfigError: the fp32 master weights would be lost.
        """
        owner: EngineOwner | None = getattr(model, _OWNER, None)
        others = owner.engines if owner is not None else None
        found = others.of(model) if others is not None and others is not self else None
        if others is None or found is None:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.dtype != found.dtypes[name]:
                raise ConfigError(
                    f"another trainer has trained the model in {parameter.dtype} with master weights ('{name}' was "
                    f"{found.dtypes[name]}), which a second trainer would lose; save the model with "
                    "trainer.save_model, load it with from_pretrained, and pass that to the second trainer"
                )
        found.engine.close(whole=True)
        others.close([model])

    def close(self, models: Iterable[nn.Module] | None = None) -> None:
        """Close the engines of these models (None: of all)."""
        for key in list(self._prepared) if models is None else [_key(model) for model in models]:
            engine = self._prepared.pop(key).engine
            engine.close()
            unhook_generation(engine.module)
            unhook_saving(engine.module)
            delattr(engine.module, _OWNER)


@dataclass(frozen=True)
class EngineOwner:
    """The owner of a model's engine. A copy of the model has no owner."""

    engines: Engines | None = None

    def __reduce__(self) -> tuple[type["EngineOwner"], tuple[()]]:
        return EngineOwner, ()


def _key(model: Any) -> int:
    """Return the key of a model, which is that of its compiled form, too."""
    return id(getattr(model, "_orig_mod", model))


def _compute_of(model: nn.Module) -> str:
    """Return the common 16-bit dtype of all floating-point parameters; fp32 if there is none."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return _COMPUTE.get(next(iter(dtypes)), "fp32") if len(dtypes) == 1 else "fp32"


def accumulates_unsharded(engine: Engine) -> bool:
    """Return True if gradients are stored unsharded between micro-batches, and only the last one must reduce them."""
    return not any(row.grad_between.shard_axes for row in engine.plan.values())
