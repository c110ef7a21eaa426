"""Squared norms, independent of how gradients are sharded."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.kernels.chunks import chunks
from partita.memory.accelerator import is_host
from partita.table.flat_range import memory_order
from partita.table.span import QUANTUM


def square(grad: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the squared norm of a tensor of any shape, in float64.

    Norms are computed in ``dtype`` over blocks of :data:`QUANTUM` elements in memory order, and their squares are
    summed in float64. Parameters and shards begin at block borders, so blocks are the same under every mesh and stage.

    Args:
        dtype: the default overflows where a block's norm exceeds 1.8e19.
    """
    return total_squared_norm([grad], dtype=dtype)


def total_squared_norm(grads: Iterable[Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum of :func:`square` over tensors on one device, with one kernel per tensor and three for the sum."""
    norms = [norms for grad in grads for norms in _block_norms(grad, dtype)]
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).double().square().sum()


def _block_norms(grad: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    flat = grad.view(-1) if grad.is_contiguous() else grad.permute(memory_order(grad.stride())).reshape(-1)
    remainder = flat.numel() % QUANTUM
    blocks = flat[: flat.numel() - remainder]
    # On the host, torch converts its whole input before it sums: a chunk stays in the cache.
    converts = is_host(flat.device) and flat.dtype != dtype and blocks.numel() > 0
    for chunk in chunks(blocks) if converts else [slice(None)]:
        yield torch.linalg.vector_norm(blocks[chunk].view(-1, QUANTUM), dim=1, dtype=dtype)
    if remainder:  # padded, as in a shard: the kernel sums rows of another length in another order
        yield torch.linalg.vector_norm(
            F.pad(flat[-remainder:], (0, QUANTUM - remainder)).view(1, QUANTUM), dim=1, dtype=dtype
        )
