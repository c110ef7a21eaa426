"""What all ranks find out together, so that none waits for one that has given up: errors, and settings that differ."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from partita.comm.group import Group
from partita.config.messages import shown
from partita.errors import ConfigError, PartitaError

# What the other ranks are told that this one is at.
CALL = "a check of all ranks"
_ABSENT = "nothing"


@contextmanager
def together(group: Group, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
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
