"""Allocation of long-lived memory: for states and slots, never for temporary tensors of a step.

On the host every allocation is a separate anonymous mapping. In malloc's heap, blocks that live for the entire run
would lie between those that a step allocates and frees, and fragmentation would grow the heap. A mapping consists of
full pages, as the disk requires (:mod:`partita.memory.disk`), and is not rounded up further; torch rounds pinned memory
up to a power of two.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from partita.memory import accelerator

ALIGNMENT = 16  # of the tensors in a PinnedBuffer, in bytes


def allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a flat tensor of zeros, page-aligned on the host; dropping it returns its memory to the system."""
    if not accelerator.is_host(device) or accelerator.is_simulated(device) or num_elements == 0:
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return torch.frombuffer(Mapping(num_elements * dtype.itemsize), dtype=dtype)


def allocate_host(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a flat tensor of zeros on the host; pinned if ``device`` is an accelerator, so that copies do not block
    the caller. It may be dropped only after its copies are done.

    Raises:
        PartitaError: that many bytes cannot be pinned.
    """
    if not accelerator.has_streams(device) or num_elements == 0:
        return allocate(num_elements, dtype, accelerator.host_of(device))
    mapping = Mapping(num_elements * dtype.itemsize)
    mapping.pin(device)
    return torch.frombuffer(mapping, dtype=dtype)


class PinnedBuffer:
    """Pinned host memory for copies from an accelerator, as large as the largest request so far."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the same shapes, strides and dtypes.

        They are valid until the next call, before which copies to and from them must be done.
        """
        if not tensors:
            return []
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        if self._memory is None or self.num_bytes < sum(sizes):
            self._memory = None  # freed first
            self._memory = allocate_host(sum(sizes), torch.uint8, tensors[0].device)
        parts = self._memory[: sum(sizes)].split(sizes)
        return [_as_strided(part, tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _as_strided(memory: Tensor, tensor: Tensor) -> Tensor:
    strides = torch.empty_like(tensor, device="meta").stride()
    return memory[: tensor.nbytes].view(tensor.dtype).as_strided(tensor.shape, strides)


class Mapping(mmap.mmap):
    """Private memory of this process, in full pages."""

    _unpin: Callable[[], object] | None = None

    def __new__(cls, num_bytes: int) -> "Mapping":
        return super().__new__(cls, -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, num_bytes: int) -> None:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # With huge pages, requests to the disk have fewer segments. They never extend beyond the mapping.
            with contextlib.suppress(OSError):  # a kernel without them
                self.madvise(mmap.MADV_HUGEPAGE)

    def pin(self, device: torch.device) -> None:
        """Register the memory with an accelerator for as long as the mapping exists."""
        # After a fork, copy-on-write would replace a registered page at this process's first write to it.
        self.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        self._unpin = accelerator.pin(address, len(self), device)

    def __del__(self) -> None:
        if self._unpin is not None:  # here, because a finalizer would run after the memory is unmapped
            self._unpin()


def trim() -> None:
    """Return memory that malloc has cached to the system, if the C library can.

    This is for large blocks that this module has not allocated: small allocations in their place keep the heap from
    shrinking, and the next large block does not fit.
    """
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def over(storage: torch.UntypedStorage, dtype: torch.dtype, num_elements: int, offset: int = 0) -> Tensor:
    """Return a flat tensor over a storage, ``offset`` elements from its start."""
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset, (num_elements,))  # type: ignore[call-overload,no-any-return]
