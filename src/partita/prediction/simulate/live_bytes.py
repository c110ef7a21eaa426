"""Memory of autograd and of the model's operators on a simulated device."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes that operators have allocated and not freed since this mode was entered (``now``), and their ``peak``.

    Memory that existed before is not counted, even if a new tensor is a view of it. Memory that a kernel allocates
    within a call is not counted either: oneDNN's blocked copies of a convolution's arguments depend on the processor
    and the number of threads of the training, which a simulation does not know.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known = dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = None
        for storage in _storages(result):
            if storage._cdata not in self._known:
                inputs = {each._cdata for each in _storages((args, kwargs))} if inputs is None else inputs
                if storage._cdata not in inputs and func.overloadpacket is not torch.ops.aten.set_:
                    self._add(storage)
        return result

    def _add(self, storage: UntypedStorage) -> None:
        self._known[storage._cdata] = storage.nbytes()
        weakref.finalize(storage, self._freed, storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)


def _storages(value: Any) -> Iterator[UntypedStorage]:
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor) and tensor.is_meta:
            yield tensor.untyped_storage()
