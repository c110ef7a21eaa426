"""The states that a config's optimizer keeps for each parameter, and its work on full parameters."""

from dataclasses import dataclass, field

import torch
from torch import nn

from partita.config.schema import Config
from partita.layout.owners import FullWork
from partita.layout.state_bytes import Moments
from partita.optim.build import build_optimizer
from partita.optim.muon import Muon
from partita.optim.traits import moments_of


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer's states per element of each parameter, and its work on full parameters at their owners."""

    moments: Moments = field(default_factory=Moments)
    work: FullWork = field(default_factory=FullWork)


def plan_optimizer(model: nn.Module, config: Config) -> OptimizerPlan:
    """Return what the optimizer of ``config`` needs for ``model``, which may be on ``meta``.

    Raises:
        ConfigError: a rule of the config does not apply to the model.
    """
    if config.optimizer.name == "muon":
        muon = Muon.of(model.parameters(), config.optimizer, model)
        return OptimizerPlan(moments_of(muon, model), muon.full_work(model))
    example = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    return OptimizerPlan(moments_of(build_optimizer([example], config, None, kernels=False)))
