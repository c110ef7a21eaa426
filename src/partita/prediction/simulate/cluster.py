"""Simulation of a cluster: one rank of each role, in sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partita.comm.simulated import Requests
from partita.config.load import load_config
from partita.config.resolve import Resolved, resolve
from partita.config.schema import Config
from partita.errors import ConfigError
from partita.layout.placement import has_auto_tiers
from partita.memory import accelerator
from partita.prediction.simulate.rank import RankReport, SimulatedModel, simulate_rank
from partita.prediction.simulate.roles import Role, distinct_roles, role_of

RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Cluster:
    """A cluster of ``num_ranks`` processes, ``ranks_per_node`` on each node, each with a device of type ``kind``."""

    num_ranks: int
    kind: str = accelerator.USUAL_KIND
    ranks_per_node: int = RANKS_PER_NODE


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation: the resolved config, and a report for each simulated rank."""

    resolved: Resolved
    ranks: tuple[RankReport, ...]


def simulate(
    simulated_model: SimulatedModel,
    config: str | Path | Mapping[str, Any] | Config | None,
    cluster: Cluster,
    ranks: Sequence[int] | None = None,
) -> Simulation:
    """Train as some ranks of a cluster with the real engine, on tensors without values.

    Args:
        config: the config, as for :func:`partita.initialize`.
        ranks: the ranks to simulate; None: one rank of each distinct role.

    Raises:
        ConfigError: the configuration is invalid for the cluster, or has tiers that are ``auto``; there is no such
            rank.
        PartitaError: the model's forward reads the values of tensors.
    """
    settings = load_config(config)
    _check_kind(cluster.kind)
    resolved = resolve(settings, cluster.num_ranks, cluster.kind, min(cluster.ranks_per_node, cluster.num_ranks))
    _check_placed(settings)
    mesh = resolved.mesh
    roles = distinct_roles(mesh) if ranks is None else [role_of(rank, mesh) for rank in ranks]
    requests = Requests()
    if ranks is not None and mesh.pipeline > 1:  # the requests of the last stage determine those of the others
        simulate_rank(simulated_model, resolved, role_of(mesh.num_ranks - 1, mesh), cluster.kind, requests)
    found = dict[Role, RankReport]()
    for role in sorted(roles, key=lambda role: -mesh.coordinate(role.rank, "pipeline")):
        found[role] = simulate_rank(simulated_model, resolved, role, cluster.kind, requests)
    return Simulation(resolved, tuple(found[role] for role in roles))


def _check_kind(kind: str) -> None:
    try:
        torch.device(kind)
    except RuntimeError:
        raise ConfigError(
            f"device: expected a device type of PyTorch (cpu, {accelerator.USUAL_KIND}); got '{kind}'"
        ) from None


def _check_placed(settings: Config) -> None:
    if has_auto_tiers(settings.zero.offload):
        raise ConfigError(
            "zero.offload: auto depends on the free memory of the machine that trains, and cannot be simulated: name a "
            "tier (none, host, disk) for each state"
        )
    if settings.activations.keep_bytes == "auto":
        raise ConfigError(
            "activations.keep_bytes: auto depends on the free memory of the machine that trains, and cannot be "
            "simulated: name a number of bytes, or none"
        )
