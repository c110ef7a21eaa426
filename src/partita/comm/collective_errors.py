"""Collective checks, so that no rank waits for one that has given up: errors, settings that differ, memory
that does not suffice.
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

# What the other ranks are told that this one is at.
CALL = "a check of all ranks"
_ABSENT = "nothing"


@contextmanager
def shared_errors(group: Group, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A block that is left on all ranks, or raises on all of them. Nothing in it may wait for another rank.

    Args:
        undo: called on all ranks before they raise; it may use collectives.

    Raises:
        Exception: what this rank met.
        PartitaError: what the first of the other ranks met, where this one met nothing.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = group.exchange(torch.tensor([error is not None], device="cpu"), CALL).wait()
    if bool(failed.any()):
        said = group.exchange_objects(None if error is None else f"{type(error).__name__}: {error}", CALL)
        undo()
        if error is not None:
            raise error
        rank, first = next((rank, text) for rank, text in enumerate(said) if text is not None)
        raise PartitaError(f"rank {rank} of the group over {', '.join(group.axes)} failed: {first}")


def check_settings_alike(settings: Mapping[str, object], group: Group) -> None:
    """Compare what the ranks are set to, by the names of the settings: otherwise each would train in its own way, or
    wait in vain.

    Raises:
        ConfigError: on every rank: names a setting that differs, and two ranks with their values.
    """
    every = group.exchange_objects(dict(settings), "partita.initialize")
    for rank, other in enumerate(every):
        for name in [*every[0], *(name for name in other if name not in every[0])]:
            first, found = every[0].get(name, _ABSENT), other.get(name, _ABSENT)
            if first != found:
                raise ConfigError(
                    f"the ranks' settings differ: {name} is {shown(first)} on rank 0 and {shown(found)} on rank "
                    f"{rank}; give every rank the same configuration and optimizer"
                )


@dataclass(frozen=True)
class TooLittle:
    """A memory (a node's, or ``rank N``'s own) that has fewer bytes ``free`` than its ranks need."""

    memory: str
    needed: int
    free: int


def lack_of_memory(needed: int, free: int, group: Group, call: str, *, shared: bool = True) -> TooLittle | None:
    """The first memory that does not suffice for what its ranks ``needed``, in bytes; the same answer on every rank.

    Args:
        free: bytes of the memory that this rank uses.
        shared: whether that is the node's; off: a device of its own.
    """
    memory = f"node {socket.gethostname()}" if shared else f"rank {group.index}"
    total, least = Counter[str](), dict[str, int]()
    for where, num_bytes, there in group.exchange_objects((memory, needed, free), call):
        total[where] += num_bytes
        least[where] = min(there, least.get(where, there))
    short = [TooLittle(where, total[where], least[where]) for where in total if total[where] > least[where]]
    return short[0] if short else None
