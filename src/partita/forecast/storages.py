"""Storages that operators allocate and free.

Their bytes are counted: in total, without a dependence on parameters, and without growth with the number of samples.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.forecast.peak import NOTHING, Size


@dataclass(frozen=True)
class Mark:
    """The identity of a storage, which differs from that of a later storage at the same address."""

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
    """Live storages and their sizes.

    Attributes:
        live: size of all live storages.
        early: size of the live storages that were allocated before :meth:`end_early`.
        early_apart: size of the early storages that depend on no parameter.
        missed: bytes of the watched storages that have been freed.

    Args:
        params: storages of the parameters, which exist before.
        samples: a number of samples that divides no other size, or 1. A size that it does not divide is fixed: it does
            not depend on the number of samples.
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
        """Return True if a tensor was computed from a parameter, or is one."""
        address = tensor.untyped_storage()._cdata
        return address in self._params or (address in self._alive and self._alive[address].depends)

    def end_early(self) -> None:
        """Count storages that are allocated from now on as not early."""
        self._is_early = False

    def mark(self, tensor: Tensor) -> Mark | None:
        """Return the identity of a tensor's storage; None if the storage existed before."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return None if found is None else found.mark

    def is_there(self, mark: Mark) -> bool:
        """Return True if the storage is still alive."""
        found = self._alive.get(mark.address)
        return found is not None and found.mark == mark

    def size_of(self, mark: Mark) -> Size:
        """Return the size of the storage."""
        return Size(mark.num_bytes, mark.num_bytes if mark.num_bytes % self._samples else 0)

    def add(self, storage: torch.UntypedStorage, depends: bool) -> None:
        """Add a storage that an operator has allocated."""
        self._num += 1
        mark = Mark(storage._cdata, self._num, storage.nbytes())
        size = self.size_of(mark)
        self._alive[mark.address] = made = _Alive(mark, depends, self._is_early, size)
        self._count(made, size)
        weakref.finalize(storage, self._freed, mark)

    def watch(self, marks: Iterable[Mark | None]) -> None:
        """Watch these storages and no others: ``missed`` counts the bytes of those that are freed."""
        self.missed = 0
        self._watched = set()
        for mark in {mark for mark in marks if mark is not None}:
            if self.is_there(mark):
                self._watched.add(mark)
            else:
                self.missed += mark.num_bytes

    def _freed(self, mark: Mark) -> None:
        freed = self._alive.pop(mark.address)
        self._count(freed, NOTHING - freed.size)
        if mark in self._watched:
            self.missed += mark.num_bytes

    def _count(self, each: _Alive, more: Size) -> None:
        self.live += more
        if each.is_early:
            self.early += more
            if not each.depends:
                self.early_apart += more
