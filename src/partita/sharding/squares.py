"""Sums of squares, of which norms are made."""

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
    flat = grad.permute(memory_order(grad.stride())).reshape(-1)
    rest = flat.numel() % QUANTUM
    blocks = flat[: flat.numel() - rest].view(-1, QUANTUM)
    total = _measured(blocks, dtype)
    if rest:
        total = total + _measured(F.pad(flat[-rest:], (0, QUANTUM - rest)).view(1, QUANTUM), dtype)
    return total


def _measured(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=1, dtype=dtype)
    return norms.double().square().sum()
