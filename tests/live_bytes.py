"""What a computation leaves in memory."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made while it is on that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.by_storage: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self.by_storage:
                address = storage.data_ptr()
                self.by_storage[address] = storage.nbytes()
                weakref.finalize(storage, self.by_storage.pop, address, None)
        return result

    @property
    def total(self) -> int:
        return sum(self.by_storage.values())
