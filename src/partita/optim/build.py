"""The optimizer and the schedule that a config names, or the user's own."""

import math
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from partita.config import schema
from partita.errors import ConfigError
from partita.memory.accelerator import is_host
from partita.optim.fused import FusedAdam, FusedLion, FusedSGD

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]
Scheduling = Callable[[Optimizer], LRScheduler]


def build_optimizer(
    params: list[nn.Parameter], config: schema.Config, given: Optimizer | Factory | None, *, kernels: bool
) -> Optimizer:
    """The user's optimizer, the one that the user's callable makes, or the config's.

    Args:
        kernels: whether the config's is to be one of :mod:`partita.optim.fused` rather than torch's.

    Raises:
        ConfigError: what is given is no optimizer, and no callable that returns one; or it cannot have the states that
            the config asks for.
    """
    if given is not None:
        _check_states(config)
    if isinstance(given, Optimizer):
        return given
    if given is not None:
        if not callable(given):
            raise ConfigError(
                f"optimizer: expected a torch.optim.Optimizer or a callable that makes one; got a {_kind(given)}"
            )
        made = given(params)
        if not isinstance(made, Optimizer):
            raise ConfigError(f"optimizer: the callable returned a {_kind(made)}, expected a torch.optim.Optimizer")
        return made
    return _configured(params, config, kernels)


def settings_of(optimizer: Optimizer) -> dict[str, object]:
    """The class, the groups' sizes and plain settings, by name: what every rank must have alike."""
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
    """Whether the config's optimizer is one of :mod:`partita.optim.fused`: for 16-bit parameters that are updated on
    the CPU, and for states that torch's do not have.
    """
    on_cpu = is_host(device) or config.zero.offload.optimizer != "none"
    in_16_bits = compute != "fp32" and (on_cpu or config.precision.master == "split")
    return in_16_bits or config.precision.moments == "int8"


def _check_states(config: schema.Config) -> None:
    """Only the config's own optimizers know other states than fp32 tensors."""
    for key, value in (("master", config.precision.master), ("moments", config.precision.moments)):
        if value != "fp32":
            raise ConfigError(
                f"precision.{key}: {value} needs the config's optimizer, but one was passed to partita.initialize: "
                f"leave one of the two out"
            )


def _configured(params: list[nn.Parameter], config: schema.Config, kernels: bool) -> Optimizer:
    section = config.optimizer
    if section.name == "sgd":
        sgd = {"lr": section.lr, "momentum": section.momentum, "weight_decay": section.weight_decay}
        return FusedSGD(params, **sgd) if kernels else torch.optim.SGD(params, **sgd, fused=True)  # type: ignore[arg-type]
    betas = tuple(section.betas)
    if section.name == "lion":
        return FusedLion(params, lr=section.lr, betas=betas, weight_decay=section.weight_decay)
    decoupled = section.name == "adamw"
    adam = {"lr": section.lr, "betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}
    if kernels:
        return FusedAdam(params, **adam, decoupled=decoupled, int8=config.precision.moments == "int8")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, **adam, fused=True)  # type: ignore[arg-type]


def build_schedule(
    optimizer: Optimizer, section: schema.Schedule, given: LRScheduler | Scheduling | None = None
) -> LRScheduler:
    """The user's scheduler, the one that the user's callable makes, or the config's.

    Raises:
        ConfigError: what is given is no scheduler of ``optimizer``, or one that has to be told a metric.
    """
    if given is None:
        return Schedule(optimizer, section)
    if not isinstance(given, LRScheduler) and not callable(given):
        raise ConfigError(f"scheduler: expected a torch scheduler or a callable that makes one; got a {_kind(given)}")
    made = given if isinstance(given, LRScheduler) else given(optimizer)
    if not isinstance(made, LRScheduler):
        raise ConfigError(f"scheduler: the callable returned a {_kind(made)}, expected a torch scheduler")
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "scheduler: ReduceLROnPlateau has to be told a metric, which the engine does not know; make it on "
            "engine.optimizer and call its step(metric) yourself"
        )
    if made.optimizer is not optimizer:
        raise ConfigError(
            "scheduler: it was made on another optimizer than the engine's; pass that optimizer, too, or a callable"
        )
    return made


class Schedule(LRScheduler):
    """A schedule over optimizer steps: linear warm-up, then constant, or linear or cosine decay to ``min_lr``.

    Every group starts from its own rate; one whose rate is below ``min_lr`` keeps it. A constant schedule leaves the
    rates alone after the warm-up, so that they may be set by hand or by another scheduler.
    """

    def __init__(self, optimizer: Optimizer, section: schema.Schedule) -> None:
        self._name, self._warmup, self._least = section.name, section.warmup_steps, section.min_lr
        self._total = section.total_steps or 0
        super().__init__(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """How far it is; the curve is the config's."""
        return {key: self.__dict__[key] for key in ("last_epoch", "_step_count", "_last_lr", "base_lrs")}

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group in the next step; groups may have been added since."""
        step, groups = self.last_epoch, self.optimizer.param_groups
        if self._name == "constant" and (step > self._warmup or not self._warmup):
            return [group["lr"] for group in groups]
        peaks = [float(group.setdefault("initial_lr", group["lr"])) for group in groups]
        return [peak * self._factor(min(1.0, self._least / peak) if peak else 1.0, step) for peak in peaks]

    def _factor(self, least: float, step: int) -> float:
        if step < self._warmup:
            return (step + 1) / (self._warmup + 1)
        if self._name == "constant":
            return 1.0
        done = min(1.0, (step - self._warmup) / max(1, self._total - self._warmup))
        left = 1.0 - done if self._name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return least + (1.0 - least) * left


def _kind(value: object) -> str:
    return type(value).__name__
