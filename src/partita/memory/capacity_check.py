"""Capacity check before allocation: a rank's states must fit into the free memory; a cheaper ZeRO stage is logged."""

import logging
from collections import Counter

import torch
from torch import nn

from partita.config.messages import format_bytes
from partita.errors import PartitaError
from partita.layout.blueprint import Blueprint
from partita.layout.budget import MemoryBudget
from partita.layout.remedies import cheaper_stage, settings_that_fit
from partita.layout.state_bytes import bytes_by_tier, model_state_bytes
from partita.memory import accelerator
from partita.memory.capacity import free_now, host_memory
from partita.table.residence import Tier

_log = logging.getLogger("partita")
# Disk space is reserved when the disk tier is opened, which raises if it is missing.
_UNKNOWN = 2**63


def check_capacity(blueprint: Blueprint, model: nn.Module, device: torch.device) -> None:
    """Check that the states of this rank fit into the free memory. Only the states are checked, because their size is
    exact; other ranks of the node are not included. Out-of-memory errors of a step are explained when they occur.

    Raises:
        PartitaError: the states do not fit. The text lists the missing bytes of each memory, and config changes with
            which they would fit.
    """
    if accelerator.is_simulated(device):
        return
    budget = _free(model, device)
    units, moments = blueprint.units, blueprint.moments
    states = bytes_by_tier(model_state_bytes(units, None, moments))
    shortfall = [tier for tier in budget.shortfall(states) if tier is not Tier.DISK]
    if not shortfall:
        return
    working = blueprint.working_bytes(units)
    where = " and ".join("memory" if budget.one_memory else tier.value for tier in shortfall)
    lines = [f"partita.initialize: the states of a rank do not fit ({where}), and nothing was allocated"]
    lines += [_line(tier, states, working, budget) for tier in Tier if states[tier] or working[tier]]
    if changes := settings_that_fit(blueprint, budget):
        lines.append("They would fit with:")
        lines += [f"  {place}. {change}" for place, change in enumerate(changes, 1)]
    else:
        lines.append("No stage and no tier makes them fit: start more ranks, or use a smaller model")
    raise PartitaError("\n".join(lines))


def log_lower_stage(blueprint: Blueprint, model: nn.Module, device: torch.device) -> None:
    """Log one line if a lower ZeRO stage is certain to fit and sends less. A memory that ranks may share is divided by
    the number of ranks.
    """
    num_ranks = blueprint.resolved.mesh.num_ranks
    if accelerator.is_simulated(device) or num_ranks == 1:
        return
    budget = _free(model, device)
    if (line := cheaper_stage(blueprint, budget.shared(num_ranks))) is not None:
        _log.info("%s", line)


def _free(model: nn.Module, device: torch.device) -> MemoryBudget:
    """Return the free bytes plus the current bytes of the model's values, which will move to their planned tier."""
    host = host_memory()[1] + _bytes_on(model, accelerator.HOST)
    if accelerator.is_host(device):
        return MemoryBudget(host, 0, _UNKNOWN, one_memory=True)
    return MemoryBudget(free_now(device) + _bytes_on(model, device), host, _UNKNOWN)


def _bytes_on(model: nn.Module, device: torch.device) -> int:
    return sum(param.nbytes for param in model.parameters() if param.device == device)


def _line(tier: Tier, states: Counter[Tier], working: Counter[Tier], budget: MemoryBudget) -> str:
    shares = tier is Tier.HOST and budget.one_memory
    free = "" if tier is Tier.DISK else "; the device's memory" if shares else f"; {format_bytes(budget.of(tier))} free"
    needed = f"{format_bytes(states[tier]):>8} of states + {format_bytes(working[tier])} of working memory"
    return f"  {tier.value:<7}{needed}{free}"
