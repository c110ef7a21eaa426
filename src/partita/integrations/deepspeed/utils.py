"""``deepspeed.utils``: a loader that repeats."""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, Self

from partita.integrations.deepspeed.unsupported import UTILS, missing


class RepeatingLoader:
    """An iterator over a loader that begins again where the loader ends. ``loader`` is the loader.

    Raises:
        StopIteration: from ``next``: the loader is empty.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed.utils", name, UTILS)
