"""Errors that all ranks share: where one fails in what it does alone, the others must not wait for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from partita.comm.collectives import Collectives
from partita.errors import PartitaError

# What the other ranks are told that this one is at.
CALL = "a check of all ranks"


@contextmanager
def together(
    collectives: Collectives, axes: tuple[str, ...], undo: Callable[[], None] = lambda: None
) -> Iterator[None]:
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
    failed, exchanged = collectives.exchange(torch.tensor([error is not None], device="cpu"), axes, CALL)
    exchanged.wait()
    if bool(failed.any()):
        said = collectives.exchange_objects(None if error is None else f"{type(error).__name__}: {error}", axes, CALL)
        undo()
        if error is not None:
            raise error
        rank, first = next((rank, text) for rank, text in enumerate(said) if text is not None)
        raise PartitaError(f"rank {rank} of the group over {', '.join(axes)} failed: {first}")
