"""Checks in which all ranks raise together, so that no rank waits for one that has failed: exceptions, differing
settings, insufficient memory.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from partita.comm.group import Group
from partita.config.messages import shown
from partita.errors import ConfigError, PartitaError
from partita.memory import accelerator

# The name of the call that the other ranks see.
CALL = "a check of all ranks"
_MISSING = "nothing"


@contextmanager
def shared_errors(group: Group, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise on all ranks if the block raises on any of them. The block must not use collectives.

    Args:
        undo: called on all ranks before they raise; it may use collectives.

    Raises:
        Exception: this rank's own error.
        PartitaError: this rank succeeded; the text is the error of the first rank that failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = group.exchange(torch.tensor([error is not None], device="cpu"), CALL).wait()
    if bool(failed.any()):
        results = group.exchange_objects(None if error is None else f"{type(error).__name__}: {error}", CALL)
        undo()
        if error is not None:
            raise error
        rank, first = next((rank, text) for rank, text in enumerate(results) if text is not None)
        raise PartitaError(f"rank {rank} of the group over {', '.join(group.axes)} failed: {first}")


def check_equal_settings(settings: Mapping[str, object], group: Group) -> None:
    """Check that all ranks have equal ``settings``. Ranks with different settings would train differently or hang.

    Raises:
        ConfigError: on every rank; it names a setting that differs, and two ranks with their values.
    """
    every = group.exchange_objects(dict(settings), "partita.initialize")
    for rank, other in enumerate(every):
        for name in [*every[0], *(name for name in other if name not in every[0])]:
            first, found = every[0].get(name, _MISSING), other.get(name, _MISSING)
            if first != found:
                raise ConfigError(
                    f"the ranks' settings differ: {name} is {shown(first)} on rank 0 and {shown(found)} on rank "
                    f"{rank}; give every rank the same configuration and optimizer"
                )


def check_own_devices(device: torch.device, group: Group) -> None:
    """Check that no two ranks use the same accelerator, which its backend (NCCL) refuses at the first collective.

    Raises:
        ConfigError: on every rank; it names two ranks that share a device.
    """
    users = dict[tuple[str, tuple[str, str]], int]()
    found = (socket.gethostname(), accelerator.identity(device))
    for rank, (host, identity) in enumerate(group.exchange_objects(found, "partita.initialize")):
        if identity is not None and users.setdefault((host, identity), rank) != rank:
            uuid, name = identity
            raise ConfigError(
                f"device: ranks {users[host, identity]} and {rank} both use {name} of {host} ({uuid}): expected a "
                "device for each rank. Start one process per device, or let ranks share devices, for tests "
                "(communication.through_host: true)"
            )


@dataclass(frozen=True)
class MemoryShortfall:
    """A memory (a node's, or that of ``rank N``) with fewer bytes ``free`` than its ranks need."""

    memory: str
    needed: int
    free: int


def find_memory_shortfall(
    needed: int, free: int, group: Group, call: str, *, shared: bool = True
) -> MemoryShortfall | None:
    """Return the first memory with fewer free bytes than its ranks need together, or None. Collective: every rank gets
    the same answer.

    Args:
        needed: bytes that this rank needs.
        free: free bytes of the memory that this rank uses.
        shared: True if all ranks of the node use that memory; False if it belongs to this rank's device.
    """
    memory = f"node {socket.gethostname()}" if shared else f"rank {group.index}"
    total, least = Counter[str](), dict[str, int]()
    for where, num_bytes, there in group.exchange_objects((memory, needed, free), call):
        total[where] += num_bytes
        least[where] = min(there, least.get(where, there))
    short = [MemoryShortfall(where, total[where], least[where]) for where in total if total[where] > least[where]]
    return short[0] if short else None
