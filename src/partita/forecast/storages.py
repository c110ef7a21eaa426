"""The storages that operators make and give back: how many bytes there are, which follow from parameters, and which are
as large for every number of samples.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.forecast.peak import NOTHING, Size


@dataclass(frozen=True)
class Mark:
    """A storage, told from a later one at the same address."""

    address: int
    number: int
    num_bytes: int


@dataclass(frozen=True)
class _Alive:
    mark: Mark
    depends: bool
    is_early: bool
    size: Size


class Storages:
    """Attributes: ``live``: of those that are there; ``early``: of those of them that were made before
    :meth:`end_early`, and ``early_apart``: of these, of what depends on no parameter; ``missed``: of those that are
    watched, the bytes of what is gone. What ``samples`` do not divide is as large for every number of them.

    Args:
        params: the storages of parameters, which are there before.
        samples: how many there are: a number that divides nothing else, or 1.
    """

    def __init__(self, params: Iterable[torch.UntypedStorage], samples: int = 1) -> None:
        self.live = self.early = self.early_apart = NOTHING
        self.missed = 0
        self._samples = samples
        self._num = 0
        self._is_early = True
        self._params = {storage._cdata for storage in params}
        self._alive = dict[int, _Alive]()
        self._watched = set[Mark]()

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive

    def depends(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed with a parameter, or is one."""
        address = tensor.untyped_storage()._cdata
        return address in self._params or (address in self._alive and self._alive[address].depends)

    def end_early(self) -> None:
        """What is made from now on is not early."""
        self._is_early = False

    def mark(self, tensor: Tensor) -> Mark | None:
        """The storage of a tensor; None if it was there before."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return None if found is None else found.mark

    def is_there(self, mark: Mark) -> bool:
        """Whether it is still."""
        found = self._alive.get(mark.address)
        return found is not None and found.mark == mark

    def size_of(self, mark: Mark) -> Size:
        """Of its storage."""
        return Size(mark.num_bytes, mark.num_bytes if mark.num_bytes % self._samples else 0)

    def add(self, storage: torch.UntypedStorage, depends: bool) -> None:
        """One that an operator made."""
        self._num += 1
        mark = Mark(storage._cdata, self._num, storage.nbytes())
        size = self.size_of(mark)
        self._alive[mark.address] = made = _Alive(mark, depends, self._is_early, size)
        self._count(made, size)
        weakref.finalize(storage, self._gone, mark)

    def watch(self, marks: Iterable[Mark | None]) -> None:
        """From now on ``missed`` is of these."""
        self.missed = 0
        self._watched = set()
        for mark in {mark for mark in marks if mark is not None}:
            if self.is_there(mark):
                self._watched.add(mark)
            else:
                self.missed += mark.num_bytes

    def _gone(self, mark: Mark) -> None:
        gone = self._alive.pop(mark.address)
        self._count(gone, NOTHING - gone.size)
        if mark in self._watched:
            self.missed += mark.num_bytes

    def _count(self, each: _Alive, more: Size) -> None:
        self.live += more
        if each.is_early:
            self.early += more
            if not each.depends:
                self.early_apart += more
