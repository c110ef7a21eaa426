"""Storages that operators allocate and free.

Their bytes are counted: in total, without a dependence on parameters, and without growth with the number of samples.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.prediction.trace.sizes import NOTHING, Size


@dataclass(frozen=True)
class StorageId:
    """The identity of a storage, which differs from that of a later storage at the same address."""

    address: int
    number: int
    num_bytes: int


@dataclass(frozen=True)
class _Alive:
    storage_id: StorageId
    depends_on_params: bool
    is_early: bool
    size: Size


class Storages:
    """Live storages and their sizes.

    Attributes:
        live: size of all live storages.
        early: size of the live storages that were allocated before :meth:`end_early`.
        early_inputs: size of the early storages that depend on no parameter.
        freed_bytes: bytes of the watched storages that have been freed.

    Args:
        params: storages of the parameters, which exist before.
        samples: a number of samples that divides no other size, or 1. A size that it does not divide is fixed: it does
            not depend on the number of samples.
    """

    def __init__(self, params: Iterable[torch.UntypedStorage], samples: int = 1) -> None:
        self.live = self.early = self.early_inputs = NOTHING
        self.freed_bytes = 0
        self._samples = samples
        self._num = 0
        self._is_early = True
        self._params = {storage._cdata for storage in params}
        self._alive = dict[int, _Alive]()
        self._watched = set[StorageId]()

    def knows(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._alive

    def depends_on_params(self, tensor: Tensor) -> bool:
        """Return True if a tensor was computed from a parameter, or is one."""
        address = tensor.untyped_storage()._cdata
        return address in self._params or (address in self._alive and self._alive[address].depends_on_params)

    def end_early(self) -> None:
        """Count storages that are allocated from now on as not early."""
        self._is_early = False

    def storage_id(self, tensor: Tensor) -> StorageId | None:
        """Return the identity of a tensor's storage; None if the storage existed before."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        return None if found is None else found.storage_id

    def is_alive(self, storage_id: StorageId) -> bool:
        """Return True if the storage is still alive."""
        found = self._alive.get(storage_id.address)
        return found is not None and found.storage_id == storage_id

    def size_of(self, storage_id: StorageId) -> Size:
        """Return the size of the storage."""
        return Size(storage_id.num_bytes, storage_id.num_bytes if storage_id.num_bytes % self._samples else 0)

    def add(self, storage: torch.UntypedStorage, depends_on_params: bool) -> None:
        """Add a storage that an operator has allocated."""
        self._num += 1
        storage_id = StorageId(storage._cdata, self._num, storage.nbytes())
        size = self.size_of(storage_id)
        self._alive[storage_id.address] = made = _Alive(storage_id, depends_on_params, self._is_early, size)
        self._count(made, size)
        weakref.finalize(storage, self._freed, storage_id)

    def watch(self, storage_ids: Iterable[StorageId | None]) -> None:
        """Watch these storages and no others: ``freed_bytes`` counts the bytes of those that are freed."""
        self.freed_bytes = 0
        self._watched = set()
        for storage_id in {storage_id for storage_id in storage_ids if storage_id is not None}:
            if self.is_alive(storage_id):
                self._watched.add(storage_id)
            else:
                self.freed_bytes += storage_id.num_bytes

    def _freed(self, storage_id: StorageId) -> None:
        freed = self._alive.pop(storage_id.address)
        self._count(freed, NOTHING - freed.size)
        if storage_id in self._watched:
            self.freed_bytes += storage_id.num_bytes

    def _count(self, each: _Alive, more: Size) -> None:
        self.live += more
        if each.is_early:
            self.early += more
            if not each.depends_on_params:
                self.early_inputs += more
