"""Bytes of the live tensors that a computation has allocated."""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages(value: Any) -> Iterator[tuple[int, UntypedStorage]]:
    """Yield the address and the storage of each tensor in a pytree; tensors without data are skipped."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            with suppress(RuntimeError):  # a wrapper subclass has no data
                yield storage.data_ptr(), storage


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of storages allocated inside it: those still alive, and their ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.by_storage: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {address for address, _ in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for address, storage in _storages(result):
            if address not in self.by_storage and address not in given:
                self.by_storage[address] = storage.nbytes()
                weakref.finalize(storage, self.by_storage.pop, address, None)
        self.peak = max(self.peak, self.total)
        return result

    @property
    def total(self) -> int:
        return sum(self.by_storage.values())
