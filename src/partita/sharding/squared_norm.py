"""Sums of squares, of which norms are made."""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.plan.flat_range import memory_order
from partita.plan.span import QUANTUM


def square(grad: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum of squares of a tensor of any shape, in float64.

    It is summed in float64 over blocks of :data:`QUANTUM` elements in the order of memory, each of which is measured in
    ``dtype``. Parameters and shards begin at block borders, so blocks are the same under every mesh and stage.

    Args:
        dtype: the default overflows where a block's norm exceeds 1.8e19.
    """
    return sum_of_squares([grad], dtype=dtype)


def sum_of_squares(grads: Iterable[Tensor], *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum of :func:`square` of tensors on one device, with one kernel for each of them and three for all."""
    norms = [norms for grad in grads for norms in _block_norms(grad, dtype)]
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).double().square().sum()


def _block_norms(grad: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    flat = grad.view(-1) if grad.is_contiguous() else grad.permute(memory_order(grad.stride())).reshape(-1)
    rest = flat.numel() % QUANTUM
    yield torch.linalg.vector_norm(flat[: flat.numel() - rest].view(-1, QUANTUM), dim=1, dtype=dtype)
    if rest:  # filled up, as in a shard: the kernel adds up a row of another length in another order
        yield torch.linalg.vector_norm(F.pad(flat[-rest:], (0, QUANTUM - rest)).view(1, QUANTUM), dim=1, dtype=dtype)
