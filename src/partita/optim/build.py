"""Construction of the optimizer and the learning-rate schedule, from the config or the user's arguments."""

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from partita.config import schema
from partita.config.extension import CORE, Extension
from partita.errors import ConfigError
from partita.memory.accelerator import is_host
from partita.optim.extension import RunExtension
from partita.optim.fused import FusedAdam, FusedLion, FusedSGD
from partita.optim.muon import Muon
from partita.optim.schedule import Schedule
from partita.optim.traits import runs_on_slices

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]
Scheduling = Callable[[Optimizer], LRScheduler]


@runs_on_slices
class SGD(torch.optim.SGD):
    """torch's SGD. With ``fused=True``, parameters may get their first gradient in different steps."""

    def _init_group(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor | None]
    ) -> bool:
        is_sparse: bool = super()._init_group(group, params, grads, momenta)  # type: ignore[no-untyped-call]
        if any(momentum is not None for momentum in momenta):  # torch's kernel takes all of them or none
            pairs = zip(momenta, grads, strict=True)
            momenta[:] = [torch.zeros_like(grad) if momentum is None else momentum for momentum, grad in pairs]
        return is_sparse


def build_optimizer(
    params: list[Any],
    config: schema.Config,
    given: Optimizer | Factory | None,
    extension: Extension = CORE,
    *,
    kernels: bool,
    model: nn.Module | None = None,
) -> Optimizer:
    """Return the user's optimizer, the one that the user's callable creates, or the config's.

    Args:
        params: parameters, or groups of them.
        model: has the parameters; muon finds its matrices there.
        kernels: True if the config's optimizer is one of :mod:`partita.optim.fused` rather than torch's.

    Raises:
        ConfigError: ``given`` is neither an optimizer nor a callable that returns one, or it cannot have the states
            that the config asks for.
    """
    if given is not None:
        _check_states(config)
        if (name := config.optimizer.name) in ("onebit_adam", "muon"):
            raise ConfigError(
                f"optimizer.name: {name} was set, and an optimizer was passed to partita.initialize: leave one of "
                "the two out"
            )
    if isinstance(given, Optimizer):
        return given
    if given is not None:
        if not callable(given):
            raise ConfigError(
                f"optimizer: expected a torch.optim.Optimizer or a callable that returns one; got a {_kind(given)}"
            )
        made = given(params)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"optimizer: the callable returned a {_kind(made)}, expected a torch.optim.Optimizer")
        return made
    if config.optimizer.name == "muon":
        return Muon.of(params, config.optimizer, model)
    of_extension = extension.optimizer(params, config) if isinstance(extension, RunExtension) else None
    return _configured(params, config, kernels) if of_extension is None else of_extension


def settings_of(optimizer: Optimizer) -> dict[str, object]:
    """Return the class, the groups' sizes and plain settings, by name: they must be equal on all ranks."""
    found: dict[str, object] = {"the optimizer": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            name = f"param_groups[{number}]['{key}'] of the optimizer"
            if key == "params":
                found[f"the number of parameters in {name}"] = len(value)
            elif isinstance(value, bool | int | float | str | tuple | NoneType):
                found[name] = value
    return found


def wants_kernels(config: schema.Config, compute: str, device: torch.device) -> bool:
    """Return whether the config's optimizer is one of :mod:`partita.optim.fused`.

    These are used for 16-bit parameters that are updated on the CPU, and for states that torch's optimizers lack.
    """
    on_cpu = is_host(device) or config.zero.offload.optimizer != "none"
    in_16_bits = compute != "fp32" and (on_cpu or config.precision.master == "split")
    return in_16_bits or config.precision.moments == "int8"


def _check_states(config: schema.Config) -> None:
    """Check that the config asks for fp32 states: the user's optimizer has no others."""
    for key, value in (("master", config.precision.master), ("moments", config.precision.moments)):
        if value != "fp32":
            raise ConfigError(
                f"precision.{key}: {value} needs the config's optimizer, but an optimizer was passed to "
                "partita.initialize: leave one of the two out"
            )


def _configured(params: list[nn.Parameter], config: schema.Config, kernels: bool) -> Optimizer:
    section = config.optimizer
    if section.name == "sgd":
        sgd = {"lr": section.lr, "momentum": section.momentum, "weight_decay": section.weight_decay}
        return FusedSGD(params, **sgd) if kernels else SGD(params, **sgd, fused=True)  # type: ignore[arg-type]
    betas = tuple(section.betas)
    if section.name == "lion":
        return FusedLion(params, lr=section.lr, betas=betas, weight_decay=section.weight_decay)
    adam = {"lr": section.lr, "betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}
    decoupled = section.name == "adamw"
    if kernels:
        return FusedAdam(params, **adam, decoupled=decoupled, int8=config.precision.moments == "int8")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **adam, fused=True)  # type: ignore[arg-type]


def build_schedule(
    optimizer: Optimizer, section: schema.Schedule, given: LRScheduler | Scheduling | None = None
) -> LRScheduler:
    """Return the user's scheduler, the one that the user's callable creates, or the config's.

    Raises:
        ConfigError: ``given`` is not a scheduler of ``optimizer``, or its ``step`` needs a metric.
    """
    if given is None:
        return Schedule(optimizer, section)
    if not isinstance(given, LRScheduler) and not callable(given):
        raise ConfigError(f"scheduler: expected a torch scheduler or a callable that returns one; got a {_kind(given)}")
    made = given if isinstance(given, LRScheduler) else given(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(f"scheduler: the callable returned a {_kind(made)}, expected a torch scheduler")
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler: ReduceLROnPlateau needs a metric, which the engine does not have; create it on "
            "engine.optimizer and call its step(metric) yourself"
        )
    if made.optimizer is not optimizer:
        raise ConfigError(
            "scheduler: it was created on another optimizer than the engine's; pass that optimizer, too, or a callable"
        )
    return made


def _kind(value: object) -> str:
    return type(value).__name__
