"""The optimizer and the schedule that a config names, or the user's own."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from partita.config import schema
from partita.errors import ConfigError

Factory = Callable[[Iterable[nn.Parameter]], Optimizer]


def build_optimizer(
    params: list[nn.Parameter], section: schema.Optimizer, given: Optimizer | Factory | None
) -> Optimizer:
    """The user's optimizer, the one that the user's callable makes, or the config's (torch's fused kernels).

    Raises:
        ConfigError: the callable does not return a ``torch.optim.Optimizer``.
    """
    if isinstance(given, Optimizer):
        return given
    if given is not None:
        made = given(params)
        if not isinstance(made, Optimizer):
            raise ConfigError(
                f"optimizer: the callable returned a {type(made).__name__}, expected a torch.optim.Optimizer"
            )
        return made
    adam = {"lr": section.lr, "betas": tuple(section.betas), "eps": section.eps, "weight_decay": section.weight_decay}
    if section.name == "adamw":
        return torch.optim.AdamW(params, **adam, fused=True)  # type: ignore[arg-type]
    if section.name == "adam":
        return torch.optim.Adam(params, **adam, fused=True)  # type: ignore[arg-type]
    assert section.name == "sgd"
    return torch.optim.SGD(params, section.lr, momentum=section.momentum, weight_decay=section.weight_decay, fused=True)


def build_schedule(optimizer: Optimizer, section: schema.Schedule) -> LambdaLR:
    """A schedule over optimizer steps: linear warm-up, then constant, or linear or cosine decay to ``min_lr``.

    Every group starts from its own rate; one whose rate is below ``min_lr`` keeps it.
    """

    def factor(least: float, step: int) -> float:
        if step < section.warmup_steps:
            return (step + 1) / (section.warmup_steps + 1)
        if section.name == "constant":
            return 1.0
        decay_steps = (section.total_steps or 0) - section.warmup_steps
        done = min(1.0, (step - section.warmup_steps) / max(1, decay_steps))
        left = 1.0 - done if section.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return least + (1.0 - least) * left

    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    return LambdaLR(optimizer, [partial(factor, min(1.0, section.min_lr / lr) if lr else 1.0) for lr in rates])
