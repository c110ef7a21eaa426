"""Parts under way between the ranks of a group. What arrives can be taken piece by piece, so that the first pieces are
summed while later ones are still under way, and while they are in the processor's cache.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

# Of a part that is summed as it arrives: half of it fits, with the other summand, into the caches of small processors.
PIECE_BYTES = 1 << 20


class Work(Protocol):
    """What is under way."""

    def wait(self) -> object: ...


class Arriving(Protocol):
    """A flat tensor ``[n]`` on its way from one other rank."""

    def piece(self, start: int, stop: int) -> Tensor:
        """Wait for the elements ``[start, stop)``, which follow those asked for before; they stay where they are until
        the next are asked for.

        Raises:
            RuntimeError: the other rank has ended, or does not send them in time.
        """


class Receive:
    """From a rank that sends ``room``'s elements as messages, one for each of the ``works``."""

    def __init__(self, room: Tensor, works: Sequence[Work | None]) -> None:
        self._room, self._works = room, iter(works)

    def piece(self, start: int, stop: int) -> Tensor:
        work = next(self._works)
        if work is not None:
            work.wait()
        return self._room[start:stop]


class Exchange:
    """``arriving`` from the other ranks, in rank order, ``num_elements`` each, in pieces of ``piece`` elements; and
    what is ``leaving`` for them.
    """

    def __init__(
        self, arriving: Sequence[Arriving], leaving: Sequence[Work | None], num_elements: int, piece: int
    ) -> None:
        self._arriving, self._leaving = arriving, leaving
        self._starts, self._num_elements, self._piece = range(0, num_elements, piece), num_elements, piece

    def pieces(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Each range of elements, when it has arrived from all other ranks, with its values by rank. What left is with
        the others once the last one is done with.
        """
        for start in self._starts:
            stop = min(start + self._piece, self._num_elements)
            yield slice(start, stop), [part.piece(start, stop) for part in self._arriving]
        for work in self._leaving:
            if work is not None:
                work.wait()

    def wait(self) -> None:
        """Until everything has arrived, and what left is with the others."""
        for _ in self.pieces():
            pass
