"""Detection of non-finite losses and gradients, and of their causes among forward arguments; checksums of arguments."""

import inspect
import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partita.memory import accelerator
from partita.sharding.pytree import tensors_in

# Number of tensors that are remembered.
_MOST = 256
# Number of the first batches whose arguments are compared between the ranks: reading them waits for the device.
NUM_COMPARED = 2


class Arguments:
    """Finds floating-point forward arguments whose values are not finite, or exceed the range of ``compute``.

    Tensors are not kept alive: those that the training loop has freed are not found.

    Attributes:
        checksum: the checksum of the arguments of a batch's forwards, below 2^24; 0 after the first
            :data:`NUM_COMPARED` batches, and if ``compares`` is False.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype, *, compares: bool = False) -> None:
        self.checksum = 0
        self._num_to_compare = NUM_COMPARED if compares else 0
        try:
            self._signature = inspect.signature(type(model).forward)
        except (TypeError, ValueError):  # a forward in C++
            self._signature = inspect.Signature()
        self._largest = torch.finfo(compute).max
        self._seen = deque[tuple[str, weakref.ref[Tensor]]](maxlen=_MOST)

    def note(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Remember the arguments of a training forward."""
        if not torch.is_grad_enabled():
            return
        names = [name for name in self._signature.parameters if name != "self"]
        positional = {names[i] if i < len(names) else f"number {i + 1}": value for i, value in enumerate(args)}
        for name, value in {**positional, **kwargs}.items():
            for tensor in tensors_in(value):
                if self._num_to_compare and _is_plain(tensor):
                    values = accelerator.read(tensor).contiguous().view(-1).view(torch.uint8)
                    self.checksum = zlib.crc32(values.numpy().tobytes(), self.checksum) & 0xFFFFFF
                if tensor.is_floating_point():
                    self._seen.append((name, weakref.ref(tensor)))

    def forget(self) -> None:
        """Forget the arguments at the end of a batch."""
        self._seen.clear()
        if self.checksum:
            self._num_to_compare -= 1
            self.checksum = 0

    def describe(self) -> str:
        """Return a message about the first argument with such values, or an empty string."""
        for name, to_tensor in self._seen:
            if (tensor := to_tensor()) is None:
                continue
            if not bool(tensor.isfinite().all()):
                kind = "NaN" if bool(tensor.isnan().any()) else "infinite values"
                return f"the forward's argument '{name}' has {kind}"
            if tensor.numel() and float(tensor.abs().max()) > self._largest:
                largest = f"{self._largest:g}, the largest of the compute dtype"
                return f"the forward's argument '{name}' has values above {largest}"
        return ""


def _is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor has values in memory, and not those of a transformation (vmap) or of a trace."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel() > 0 and not is_wrapped


class FiniteWatch:
    """One flag on the device: whether all values watched since the last update are finite.

    Attributes: ``traces``: True if this rank's unreduced gradients are watched, too.
    """

    def __init__(self) -> None:
        self.traces = False
        self._finite: Tensor | None = None

    def watch(self, value: Tensor) -> None:
        """Add ``value`` to the watched values."""
        finite = value.detach().isfinite().all()
        self._finite = finite if self._finite is None else self._finite & finite

    @property
    def is_suspect(self) -> bool:
        """True if any watched value is not finite. Synchronizes with the device."""
        return self._finite is not None and not bool(accelerator.read(self._finite))

    def clear(self) -> None:
        """Forget the watched values."""
        self._finite = None
