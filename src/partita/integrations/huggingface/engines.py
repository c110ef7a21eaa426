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
from partita.integrations.huggingface.prepared import Prepared
from partita.integrations.huggingface.saving import hook_saving, unhook_saving

# The attribute of a model that says who has its engine: a trainer may be given a model that another one has trained.
_HOLDER = "_partita_holder"
_COMPUTE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class LeftToTheLoop(LRScheduler):
    """The engine's schedule where the training loop steps its own: leaves every rate as it is."""

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


class Engines:
    """Makes engines of models, and finds them.

    Args:
        config: of every engine; what the trainer gives is in it.
        compute: ``precision.compute``; None: as each model's parameters are.
        device: of every engine.
    """

    def __init__(self, config: Config, compute: str | None, device: torch.device) -> None:
        self._config = config
        self._compute = compute
        self._device = device
        self._prepared = dict[int, Prepared]()

    def __iter__(self) -> Iterator[Prepared]:
        return iter(self._prepared.values())

    def of(self, model: Any) -> Prepared | None:
        """That of a model, compiled or not."""
        return self._prepared.get(id(getattr(model, "_orig_mod", model)))

    def with_optimizer(self, optimizer: Optimizer) -> Prepared | None:
        """That whose optimizer this is."""
        return next((one for one in self._training if one.engine.optimizer is optimizer), None)

    def with_parameters(self, parameters: Iterable[nn.Parameter], call: str) -> Prepared | None:
        """That of the model which trains these parameters; None: they are no engine's.

        Raises:
            PartitaError: they are some of those that the model trains, not all.
        """
        wanted = {id(parameter) for parameter in parameters}
        for one in self._training:
            trained = {name: id(p) for name, p in one.engine.module.named_parameters() if p.requires_grad}
            if wanted.isdisjoint(trained.values()):
                continue
            if left_out := [name for name, found in trained.items() if found not in wanted]:
                raise PartitaError(
                    f"{call}: the gradients of an engine have one norm; expected all parameters that train, got some "
                    f"without '{left_out[0]}'; pass model.parameters()"
                )
            return one
        return None

    def the_trained(self) -> Prepared | None:
        """The only one that trains; None: there are none, or several."""
        found = self._training
        return found[0] if len(found) == 1 else None

    @property
    def _training(self) -> list[Prepared]:
        return [one for one in self._prepared.values() if one.trains]

    def leave_out(self, section: str) -> None:
        """Make engines without a section of the config, which the training loop carries out itself."""
        self._config = load_config(self._config.model_dump(exclude_unset=True, exclude={section}))

    def train(self, model: nn.Module, optimizer: Optimizer) -> Prepared:
        """Put a model and the optimizer on its parameters under the plan."""
        return self._add(model, optimizer)

    def freeze(self, model: nn.Module) -> Prepared:
        """Put a model under the plan that is only evaluated: its parameters do not train from now on."""
        model.requires_grad_(False)
        return self._add(model, None)

    def _add(self, model: nn.Module, optimizer: Optimizer | None) -> Prepared:
        self._take_over(model)
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
        first = next(iter(self._prepared.values()), None)
        engine = initialize(
            model,
            merged(self._config, {"precision.compute": self._compute or _compute_of(model)}),
            optimizer=optimizer,
            scheduler=LeftToTheLoop,
            mesh=first.engine.mesh if first is not None else None,
            device=self._device,
        )
        made = self._prepared[id(model)] = Prepared(engine, optimizer is not None, dtypes)
        setattr(model, _HOLDER, Holder(self))
        hook_saving(made)
        return made

    def _take_over(self, model: nn.Module) -> None:
        """End the engine that another trainer left on a model, which is whole then.

        Raises:
            ConfigError: it would lose the master weights.
        """
        holder: Holder | None = getattr(model, _HOLDER, None)
        others = holder.engines if holder is not None else None
        found = others.of(model) if others is not None and others is not self else None
        if others is None or found is None:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.dtype != found.dtypes[name]:
                raise ConfigError(
                    f"the model still belongs to the trainer that trained it before, in {parameter.dtype} with "
                    f"master weights ('{name}' came in {found.dtypes[name]}), which a second one would not have; save "
                    "it with trainer.save_model, and give the second trainer what from_pretrained loads"
                )
        found.engine.close(whole=True)
        others.close([model])

    def close(self, models: Iterable[nn.Module] | None = None) -> None:
        """End the engines of these models (None: all)."""
        wanted = list(self._prepared) if models is None else [id(model) for model in models]
        # The first has the process groups, if they were started here.
        for found in reversed([key for key in self._prepared if key in wanted]):
            engine = self._prepared.pop(found).engine
            engine.close()
            unhook_generation(engine.module)
            unhook_saving(engine.module)
            delattr(engine.module, _HOLDER)


@dataclass(frozen=True)
class Holder:
    """Who has a model's engine. A copy of the model has none."""

    engines: Engines | None = None

    def __reduce__(self) -> tuple[type["Holder"], tuple[()]]:
        return Holder, ()


def _compute_of(model: nn.Module) -> str:
    """The 16-bit dtype that all floating-point parameters have, or fp32."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return _COMPUTE.get(next(iter(dtypes)), "fp32") if len(dtypes) == 1 else "fp32"


def adds_up_whole(engine: Engine) -> bool:
    """Whether gradients are whole between micro-batches: they need not be reduced before the last one."""
    return not any(row.grad_between.shard_axes for row in engine.plan.values())
