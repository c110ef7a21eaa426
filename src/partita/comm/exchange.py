"""Parts under way between the ranks of a group. What arrives can be taken piece by piece, so that the first pieces are
summed while later ones are still under way, and while they are in the processor's cache.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor


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
    """From a rank that sends ``num_elements`` in messages of ``piece``. They come into ``buffer``, one beside the
    other; where it is smaller, later ones take the place of earlier ones.

    Args:
        post: begins to receive a message.
    """

    def __init__(self, post: Callable[[Tensor], Work], buffer: Tensor, num_elements: int, piece: int) -> None:
        self._post = post
        self._num_elements = num_elements
        self._piece = piece
        self._places = buffer.split(piece)
        self._posted = 0
        self._awaited = deque[tuple[Tensor, Work]]()
        for _ in self._places:
            self._await_next()

    def _await_next(self) -> None:
        left = self._num_elements - self._posted * self._piece
        if left > 0:
            place = self._places[self._posted % len(self._places)][:left]
            self._awaited.append((place, self._post(place)))
            self._posted += 1

    def piece(self, start: int, stop: int) -> Tensor:
        if start:  # the piece before is done with, and its place is free
            self._await_next()
        place, work = self._awaited.popleft()
        work.wait()
        return place


class Exchange:
    """``arriving`` from the other ranks, in rank order, ``num_elements`` each, in pieces of ``piece`` elements; and
    what is ``leaving`` for them.
    """

    def __init__(self, arriving: Sequence[Arriving], leaving: Sequence[Work], num_elements: int, piece: int) -> None:
        self._arriving = arriving
        self._leaving = leaving
        self._starts = range(0, num_elements, piece)
        self._num_elements = num_elements
        self._piece = piece

    def pieces(self) -> Iterator[tuple[slice, list[Tensor]]]:
        """Each range of elements, when it has arrived from all other ranks, with its values by rank. What left is with
        the others once the last one is done with.
        """
        for start in self._starts:
            stop = min(start + self._piece, self._num_elements)
            yield slice(start, stop), [part.piece(start, stop) for part in self._arriving]
        for work in self._leaving:
            work.wait()

    def wait(self) -> None:
        """Until everything has arrived, and what left is with the others."""
        for _ in self.pieces():
            pass
