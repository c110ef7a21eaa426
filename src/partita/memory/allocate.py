"""Memory that stays: for states and slots, never for what a step makes and drops.

On the host every allocation is an anonymous mapping of its own. Taken from malloc's heap, large blocks that live for
the whole run lie between those that a step allocates and frees, and the heap grows by the holes. A mapping is of whole
pages, which is also what the disk asks for (:mod:`partita.memory.disk`), and not more: torch's pinned memory is rounded
up to a power of two.
"""

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from partita.errors import PartitaError

HOST = torch.device("cpu")


def allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros, page-aligned on the host; its memory goes back to the system when it is dropped."""
    if device.type != "cpu":
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return _map(num_elements, dtype, mmap.mmap)


def allocate_host(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same on the host, such that ``device`` copies from and to it while the caller goes on (for CUDA: pinned).

    Whoever drops the memory has waited for its copies.

    Raises:
        PartitaError: CUDA cannot pin so much.
    """
    return _map(num_elements, dtype, _Pinned if device.type == "cuda" else mmap.mmap)


def _map(num_elements: int, dtype: torch.dtype, kind: Callable[..., mmap.mmap]) -> Tensor:
    num_bytes = num_elements * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(0, dtype=dtype, device=HOST)
    return torch.frombuffer(kind(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)


class _Pinned(mmap.mmap):
    """A mapping that is registered with CUDA for as long as it lasts."""

    _unregister: Callable[[], object] | None = None

    def __init__(self, _file: int, num_bytes: int, flags: int) -> None:
        # After a fork the first write to a page would give this process another page than the one CUDA knows.
        self.madvise(mmap.MADV_DONTFORK)
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        cuda = torch.cuda.cudart()
        status = cuda.cudaHostRegister(address, num_bytes, 0)
        if int(status):
            raise PartitaError(
                f"CUDA cannot pin {num_bytes} bytes of host memory ({cuda.cudaGetErrorString(status)}): raise the "
                "limit of locked memory (`ulimit -l unlimited`, or the container's), or offload less to the host"
            )
        self._unregister = lambda: cuda.cudaHostUnregister(address)

    def __del__(self) -> None:
        if self._unregister is not None:  # here, because a finalizer would come after the memory is unmapped
            self._unregister()
