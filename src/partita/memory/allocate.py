"""Memory that stays: for states and slots, never for what a step makes and drops.

On the host every allocation is an anonymous mapping of its own. Taken from malloc's heap, large blocks that live for
the whole run lie between those that a step allocates and frees, and the heap grows by the holes.
"""

import mmap

import torch
from torch import Tensor


def allocate(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of zeros, page-aligned on the host; its memory goes back to the system when it is dropped."""
    num_bytes = num_elements * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(num_elements, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=dtype)
