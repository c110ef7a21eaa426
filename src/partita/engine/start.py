"""Creation of an engine from the user's arguments: config, device, ranks, mesh."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from partita.comm import world
from partita.comm.connections import Processes
from partita.comm.mesh import Mesh
from partita.comm.world import Rendezvous
from partita.config.launchers import launch_environment
from partita.config.load import load_config
from partita.config.resolve import Resolved, describe, resolve
from partita.config.schema import Config
from partita.engine.build import UserArguments
from partita.engine.engine import Engine
from partita.errors import ConfigError
from partita.layout.blueprint import describe_large_unit
from partita.layout.placement import describe_placement, has_auto_tiers
from partita.memory import accelerator
from partita.memory.capacity import usable_cores
from partita.memory.generators import generators_kept
from partita.optim.build import Factory
from partita.sharding.unread import release

_log = logging.getLogger("partita")


def initialize(
    model: nn.Module,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    *,
    optimizer: Optimizer | Factory | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    weights: str | Path | None = None,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
) -> Engine:
    """Create the engine that trains a model.

    Every rank calls this with the same model. All ranks start from rank 0's values, or from those of ``weights``. The
    engine shards the model's parameters, which stay the same objects. The random generators of torch, numpy and Python
    are not changed. A model on ``meta`` is initialized from the state of torch's generator: to initialize two models
    differently, seed the generator or draw from it between them.

    Args:
        model: any module; on the ``meta`` device it is initialized (or loaded) unit by unit.
        config: a YAML or JSON file, a mapping, or a :class:`partita.Config`; None: all defaults.
        optimizer: an optimizer on ``model.parameters()``, or a callable that makes one; None: the config's.
        scheduler: a scheduler on that optimizer, or a callable that makes one; None: the config's schedule.
        loss_fn: ``loss_fn(output, batch)`` for :meth:`Engine.train_batch`; None: the output is the loss, or has
            ``.loss``.
        weights: a safetensors file or folder with the initial values, the same for all ranks.
        mesh: the mesh of another engine in this process, to share its process groups and their settings
            (``communication.timeout_s``, ``within_node``, ``reduction``, ``through_host``); the last of these engines
            closes it, and so does an error of the first one. None: a new one.
        device: the device that this rank computes on (``"cpu"``, ``"cuda"``, ``"cuda:1"``); None: the mesh's, or the
            rank's own accelerator if there is one.

    Raises:
        ConfigError: the config, the model and the optimizer do not match. The model can be initialized again.
    """
    return start(model, config, UserArguments(optimizer, scheduler, loss_fn, weights), mesh, device)


def start(
    model: nn.Module,
    config: str | Path | Mapping[str, Any] | Config | None,
    given: UserArguments,
    mesh: Mesh | None = None,
    device: torch.device | str | None = None,
) -> Engine:
    """Create the engine that trains a model, as :func:`initialize`, which has a part of the arguments in ``given``."""
    settings = load_config(config)
    launch = launch_environment(running=world.running())
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh: expected the mesh of another engine; got a {type(mesh).__name__}")
    device = _device(device, mesh, launch.local_rank, shared=settings.communication.through_host)
    num_ranks = mesh.num_ranks if mesh else launch.world_size
    resolved = resolve(settings, num_ranks, device.type, launch.local_world_size)
    passed = {"optimizer": given.optimizer, "schedule": given.scheduler}
    resolved = resolved.with_passed(tuple(name for name, value in passed.items() if value is not None))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"model: {type(model).__name__} has no parameters to train")
    if not accelerator.is_host(device):
        accelerator.set_device(device)
        # Launchers set one thread per rank, which would leave most cores idle in updates on the host.
        torch.set_num_threads(max(1, usable_cores() // launch.local_world_size))
    if launch.rank == 0:
        _announce(resolved)
    communication = settings.communication
    rendezvous = Rendezvous(
        launch.rank,
        num_ranks,
        communication.timeout_s,
        communication.within_node,
        communication.through_host,
        communication.reduction,
        launch.url,
    )
    is_new = mesh is None
    if mesh is None:
        mesh = Mesh(resolved.mesh, device, Processes(device, rendezvous), for_engines=True)
    elif mesh.shape != resolved.mesh:
        raise ConfigError(f"mesh: the given mesh is {mesh.shape}, but the config asks for {resolved.mesh}")
    else:
        mesh.check_open()
    release(model)
    try:
        with generators_kept(
            device
        ):  # initialization and checks draw random numbers, more on some ranks than on others
            engine = Engine(model, resolved, mesh, given)
    except BaseException:
        if is_new:
            mesh.close()
        raise
    if launch.rank == 0 and (notice := describe_large_unit(engine.units)):
        _log.info("%s", notice)
    if launch.rank == 0 and has_auto_tiers(settings.zero.offload):
        _log.info("%s", describe_placement(engine.planned_bytes))
    return engine


def _device(
    wanted: torch.device | str | None, mesh: Mesh | None, local_rank: int | None, *, shared: bool
) -> torch.device:
    """Return the device that this rank computes on. ``shared``: ranks may share a device.

    Raises:
        ConfigError: it is not a device to train on, or differs from the mesh's.
    """
    if wanted is None:
        return mesh.device if mesh is not None else accelerator.own_device(local_rank, shared=shared)
    device = accelerator.chosen_device(wanted, local_rank, shared=shared)
    if mesh is not None and mesh.device != device:
        raise ConfigError(f"device: '{device}' is not the device of the given mesh, '{mesh.device}'; leave device out")
    return device


def _announce(resolved: Resolved) -> None:
    """Log the configuration to the logger ``partita``, or to standard error if logging is not configured."""
    if not (_log.hasHandlers() or _log.level):
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # if logging is configured later
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
    _log.info("%s", describe(resolved))
    for warning in resolved.warnings:
        _log.warning("%s", warning)
