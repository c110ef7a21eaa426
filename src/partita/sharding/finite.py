"""Detection of non-finite losses and gradients since the last update, and of the forward arguments that caused them."""

import inspect
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from partita.memory import accelerator
from partita.sharding.pytree import tensors_in

# Number of tensors that are remembered.
_MOST = 256


class Arguments:
    """Finds floating-point forward arguments whose values are not finite, or exceed the range of ``compute``.

    Tensors are not kept alive: those that the training loop has freed are not found.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
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
                if tensor.is_floating_point():
                    self._seen.append((name, weakref.ref(tensor)))

    def forget(self) -> None:
        """Forget the arguments at the end of a batch."""
        self._seen.clear()

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
