"""``deepspeed.comm``: torch.distributed, initialized as partita needs it."""

import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from partita.comm import world
from partita.comm.world import Rendezvous
from partita.config.launchers import launch_environment
from partita.integrations.deepspeed.unsupported import COMM, missing
from partita.memory import accelerator

_log = logging.getLogger("partita")
_TIMEOUT = timedelta(minutes=30)
# Functions with the same name and arguments in torch.distributed.
_SAME = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier "
    "batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather get_global_rank get_rank "
    "get_world_size irecv is_available is_initialized isend monitored_barrier new_group P2POp recv reduce "
    "reduce_scatter reduce_scatter_tensor ReduceOp scatter send".split()
)


def init_distributed(
    dist_backend: str | None = None,
    *_: Any,
    timeout: timedelta = _TIMEOUT,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
    **__: Any,
) -> None:
    """Initialize torch.distributed from the launcher's environment variables, unless it is initialized already.

    Without a launcher, initialize it for a single process.

    Args:
        dist_backend: has no effect: partita uses gloo for tensors on the host, and the accelerator's backend for
            tensors on the accelerator.
        timeout: time limit of one operation.
        init_method: the rendezvous URL of ``world_size`` ranks, of which this is ``rank``. None: use the launcher's
            values. DeepSpeed's other arguments have no effect.

    Raises:
        ConfigError: a launcher's variable is missing or wrong.
        PartitaError: the ranks cannot connect to each other.
    """
    if dist.is_initialized():
        return
    launch = launch_environment()
    device = accelerator.own_device(launch.local_rank)
    backend = accelerator.backend(device)
    if dist_backend not in (None, backend) and not launch.rank:
        _log.info("init_distributed: %s for tensors on %s, not %s", backend, device.type, dist_backend)
    if init_method is not None or rank >= 0:
        both = backend if accelerator.is_host(device) else f"cpu:gloo,{device.type}:{backend}"
        dist.init_process_group(both, init_method, timeout, world_size, rank)
    elif launch.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch does not declare it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timeout)
    else:
        seconds = timeout.total_seconds()
        world.join(Rendezvous(launch.rank, launch.world_size, seconds, url=launch.url), device)


def get_local_rank() -> int:
    """Return this process's rank on its node; 0 if the launcher does not set one."""
    return launch_environment(running=world.running()).local_rank or 0


def get_world_group() -> Any:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of a process group (None: of all ranks)."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def __getattr__(name: str) -> Any:
    if name in _SAME:
        return getattr(dist, name)
    raise missing("deepspeed.comm", name, COMM)
