"""The default process group of ``torch.distributed``: the user's, or one that is started here. All meshes of the
process share the latter, and the last one destroys it.
"""

import importlib
import os
import secrets
import time
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

# Time between two looks at the requests of the other ranks.
POLL_S = 0.01


@dataclass(frozen=True)
class Rendezvous:
    """Settings with which this process joins the other ranks.

    Attributes:
        timeout_s: the time-out of every operation.
        within_node: ``communication.within_node``.
        through_host: ``communication.through_host``.
        reduction: ``communication.reduction``.
        url: ``tcp://host:port`` of the store; empty if a default group exists, or for one process.
    """

    rank: int
    num_ranks: int
    timeout_s: float
    within_node: str = "auto"
    through_host: bool = False
    reduction: str = "auto"
    url: str = ""


@dataclass
class _Started:
    """The default group and store that this module has created. The store outlives the group: rank 0's process may
    serve it, and the other ranks use it again for the next group.
    """

    group: dist.ProcessGroup | None = None
    num_users: int = 0  # meshes that use the group
    url: str = ""
    store: Store | None = None


_here = _Started()
# In a forked child: the groups and state of its ancestors, which must not be used or destroyed.
_inherited: list[tuple[dist.ProcessGroup | None, _Started]] = []


def running() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks; None without a default group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def join(rendezvous: Rendezvous, device: torch.device) -> dist.ProcessGroup | None:
    """Return the default group, and start it if there is none and there are several ranks. Pair with :func:`leave`.

    Raises:
        PartitaError: the default group belongs to the parent of this forked process; or the rendezvous failed.
    """
    if not dist.is_initialized():
        if rendezvous.num_ranks == 1:
            return None
        on_host = accelerator.is_host(device) or rendezvous.through_host
        _start("gloo" if on_host else f"cpu:gloo,{device.type}:{accelerator.backend(device)}", rendezvous)
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
    """Destroy the ``groups`` of a mesh; and the default group ``world``, if it was started here and no other mesh uses
    it.
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


def end() -> None:
    """Destroy the default group, whoever has started it; not that of a parent process."""
    world = dist.group.WORLD
    if world is not None and not any(world is parents for parents, _ in _inherited):
        dist.destroy_process_group()


def is_on_host() -> bool:
    """Return True if the default group uses gloo alone, or if there is none."""
    if not dist.is_initialized():
        return True
    by_device = dist.get_backend_config().split(",")  # such as cpu:gloo,cuda:nccl
    return all(backend.rpartition(":")[2] == dist.Backend.GLOO for backend in by_device)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Make torch use ``name`` for a group that its members create in this block.

    By default torch builds the name from the ranks and the number of groups in the process. After a group was
    destroyed, a new one could get its name, and find stale addresses in the store; and processes with different numbers
    of groups would wait for each other under different names.
    """
    own = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = own


def is_bound_to_device() -> bool:
    """Return True if the default group was created with a device. torch then splits groups from it, in which all of
    its ranks take part.
    """
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def start_alone(timeout_s: float) -> dist.ProcessGroup:
    """Return the default group of a single process, and start it if there is none. Pair with :func:`leave`."""
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
    """Start ``torch.distributed`` under an unused prefix of the store.

    Raises:
        PartitaError: the rendezvous failed.
    """
    rank, num_ranks, timeout = rendezvous.rank, rendezvous.num_ranks, timedelta(seconds=rendezvous.timeout_s)
    if not rendezvous.url:
        raise PartitaError(f"{num_ranks} ranks, but no rendezvous address: set MASTER_ADDR and MASTER_PORT")
    try:
        with connections_kept_from_children():
            if _here.store is None or _here.url != rendezvous.url:
                _here.store, _, _ = next(find_store(rendezvous.url, rank, num_ranks, timeout=timeout))
                _here.url = rendezvous.url
            _here.store.set_timeout(timeout)
            own = PrefixStore(_unused_prefix(_here.store, rendezvous), _here.store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=num_ranks, timeout=timeout)
    except RuntimeError as error:  # the base class of torch's errors of stores and connections
        raise PartitaError(
            f"rank {rank} of {num_ranks} did not reach the others at {rendezvous.url} (communication.timeout_s, "
            f"{rendezvous.timeout_s:g} s): a rank did not start, MASTER_ADDR is not the host of rank 0, or another "
            f"process uses the port (MASTER_PORT). Backend: {error}"
        ) from error
    _here.group = dist.group.WORLD
    _here.num_users = 0


def _unused_prefix(store: Store, rendezvous: Rendezvous) -> str:
    """Return a random prefix of the store, the same on all ranks. Collective.

    Under a used prefix, torch would find the stale addresses of an earlier group, or of the processes before a restart:
    torchrun keeps its store. Its nodes may count different numbers of restarts, so rank 0 chooses the prefix. Each rank
    requests it under a random number, and reads the answer to that number only. Rank 0 answers until all ranks have
    read their answers, because the first request that it sees may be that of a process before the restart.

    Raises:
        RuntimeError: a rank did not take part in time.
    """
    if rendezvous.rank:
        number = secrets.token_hex(8)
        store.set(f"partita/request/{rendezvous.rank}", number)
        prefix = store.get(f"partita/answer/{number}").decode()
        store.add(f"{prefix}/answers-read", 1)
        return prefix
    prefix, answered = f"partita/{secrets.token_hex(8)}", set[bytes]()
    end = time.monotonic() + rendezvous.timeout_s
    requests = [f"partita/request/{rank}" for rank in range(1, rendezvous.num_ranks)]
    while store.add(f"{prefix}/answers-read", 0) < len(requests):
        if time.monotonic() > end:
            raise RuntimeError("a rank has not read rank 0's answer in the store")
        for request in set(store.multi_get(requests)) - answered:
            store.set(f"partita/answer/{request.decode()}", prefix)
            answered.add(request)
        time.sleep(POLL_S)
    return prefix


def _import_without_default_group() -> None:
    """Import a module of torch whose functions keep the group that is the default during the import, as the default of
    an argument. The group's threads would run until the process exits.
    """
    own, distributed_c10d._world.default_pg = distributed_c10d._world.default_pg, None
    try:
        importlib.import_module("torch.distributed.nn.functional")
    finally:
        distributed_c10d._world.default_pg = own


def _in_child() -> None:
    global _here
    _inherited.append((dist.group.WORLD, _here))
    _here = _Started()


os.register_at_fork(after_in_child=_in_child)
_import_without_default_group()
