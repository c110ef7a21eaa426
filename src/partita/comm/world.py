"""The default group of ``torch.distributed``: that of the user, or one that is started here, which all meshes of the
process share and the last of them ends.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous as find_store

from partita.comm.node.forks import connections_kept_from_children
from partita.errors import PartitaError
from partita.memory import accelerator


@dataclass(frozen=True)
class Rendezvous:
    """The way in which this process joins the others: its rank, the number of ranks, the time-out of every operation,
    how often the processes were started again, how those of one node exchange tensors (``communication.within_node``),
    and the ``url`` under which they meet (``tcp://host:port``; empty where a group runs already, or for one process).
    """

    rank: int
    num_ranks: int
    timeout_s: float
    restarts: int = 0
    within_node: str = "auto"
    url: str = ""


@dataclass
class _Started:
    """State that was started here: the group and how many meshes use it; the store under a url, and how many groups it
    has seen. The store stays while there is no group: rank 0's process may serve it, and the others come back to it.
    """

    group: dist.ProcessGroup | None = None
    num_users: int = 0
    times: int = 0
    url: str = ""
    store: Store | None = None


_here = _Started()
# In a forked child: what was its parent's (and theirs), of which nothing may be used, nor ended.
_inherited: list[tuple[dist.ProcessGroup | None, _Started]] = []


def running() -> tuple[int, int] | None:
    """This process's rank, and the number of ranks, where there is a default group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def join(rendezvous: Rendezvous, device: torch.device) -> dist.ProcessGroup | None:
    """The default group, started if there is none and there are several ranks; to be left with :func:`leave`.

    Raises:
        PartitaError: it is that of the parent, from which this process was forked; or the ranks do not meet.
    """
    if not dist.is_initialized():
        if rendezvous.num_ranks == 1:
            return None
        own = accelerator.backend(device)
        _start(own if accelerator.is_host(device) else f"cpu:gloo,{device.type}:{own}", rendezvous)
    world = dist.group.WORLD
    if any(world is parents for parents, _ in _inherited):
        raise PartitaError(
            "this process was forked from one whose torch.distributed was running, and cannot use its connections: "
            "start processes that train before partita.initialize, or with multiprocessing's method spawn"
        )
    if world is _here.group:
        _here.num_users += 1
    return world


def leave(world: dist.ProcessGroup | None, groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy the ``groups`` that a mesh made beside the default group ``world``; and that, too, if it was started here
    and no other mesh uses it.
    """
    if world is None or not dist.is_initialized() or dist.group.WORLD is not world:
        return  # the user has ended it, and all groups with it
    if world is _here.group:
        _here.num_users -= 1
        if not _here.num_users:
            _here.group = None
            dist.destroy_process_group()
            return
    for group in groups:
        dist.destroy_process_group(group)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Have torch call a group that its members make in this block so.

    By itself it makes the name of the ranks and of how many groups the process has at the time. Where some were
    destroyed, another group had that name, and its ranks' old addresses are still in the store; where processes have
    unequally many, they wait for each other under different names.
    """
    own = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = own


def is_bound_to_device() -> bool:
    """Return whether the default group was given a device. Groups are then split from it, which takes all of its
    ranks.
    """
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def start_alone(timeout_s: float) -> dist.ProcessGroup:
    """The default group of one process, started if there is none; to be left with :func:`leave`."""
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
        _here.group = dist.group.WORLD
        _here.num_users = 0
    if dist.group.WORLD is _here.group:
        _here.num_users += 1
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _start(backend: str, rendezvous: Rendezvous) -> None:
    """Start ``torch.distributed`` on a part of the store that has not been used. In the same part torch would find the
    addresses of an earlier group, or of the processes before a restart, and look no further.

    Raises:
        PartitaError: the ranks do not meet.
    """
    rank, num_ranks, timeout = rendezvous.rank, rendezvous.num_ranks, timedelta(seconds=rendezvous.timeout_s)
    if not rendezvous.url:
        raise PartitaError(f"{num_ranks} ranks, but no address where they meet (MASTER_ADDR, MASTER_PORT)")
    try:
        with connections_kept_from_children():
            if _here.store is None or _here.url != rendezvous.url:
                _here.store, _, _ = next(find_store(rendezvous.url, rank, num_ranks, timeout=timeout))
                _here.url = rendezvous.url
                _here.times = 0
            _here.store.set_timeout(timeout)
            part = f"partita/restart-{rendezvous.restarts}-{num_ranks}/start-{_here.times}"
            _here.times += 1
            own = PrefixStore(part, _here.store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=num_ranks, timeout=timeout)
    except RuntimeError as error:  # so are torch's errors of stores and connections
        raise PartitaError(
            f"rank {rank} of {num_ranks} did not meet the others at {rendezvous.url} (communication.timeout_s, "
            f"{rendezvous.timeout_s:g} s): one of them did not start, rank 0 is on another host than MASTER_ADDR says, "
            f"or another process has the port there (MASTER_PORT). Backend: {error}"
        ) from error
    _here.group = dist.group.WORLD
    _here.num_users = 0


def _in_child() -> None:
    global _here
    _inherited.append((dist.group.WORLD, _here))
    _here = _Started()


os.register_at_fork(after_in_child=_in_child)
