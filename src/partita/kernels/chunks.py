"""Chunks of a buffer, for several operations on each element. On a CPU a chunk stays in the cache between operations,
while a full buffer is read from main memory each time. Temporaries are as large as a chunk.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from partita.memory.accelerator import is_host

# Elements of a chunk (on the host: per thread), a multiple of QUANTUM: small enough for a core's cache, large enough to
# fill a GPU.
_ON_HOST, _ON_DEVICE = 1 << 17, 1 << 24


def chunks(like: Tensor) -> Iterator[slice]:
    """Yield the range of elements of each chunk of a buffer as large as ``like``."""
    size = _ON_HOST * torch.get_num_threads() if is_host(like.device) else _ON_DEVICE
    for start in range(0, like.numel(), size):
        yield slice(start, min(start + size, like.numel()))


def in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same chunk of all ``tensors``, which have the same shape, as flat views. If a tensor is not contiguous,
    yield the full tensors.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    flat = [tensor.view(-1) for tensor in tensors]
    for chunk in chunks(flat[0]):
        yield tuple(tensor[chunk] for tensor in flat)
