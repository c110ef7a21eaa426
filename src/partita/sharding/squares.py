"""What gradients contribute to the norm."""

import torch
import torch.nn.functional as F
from torch import Tensor

from partita.plan.flat_range import memory_order
from partita.plan.span import QUANTUM


def square(grad: Tensor) -> Tensor:
    """The sum of squares of a gradient of any shape, in float64.

    It is added up in float64 over blocks of :data:`QUANTUM` elements as they lie in memory, each measured in fp32.
    Parameters begin, and shards are cut, where a block does: so blocks are the same under every mesh and stage.
    """
    flat = grad.permute(memory_order(grad.stride())).reshape(-1)
    rest = flat.numel() % QUANTUM
    blocks = flat[: flat.numel() - rest].view(-1, QUANTUM)
    total = _measured(blocks)
    if rest:
        total = total + _measured(F.pad(flat[-rest:], (0, QUANTUM - rest)).view(1, QUANTUM))
    return total


def _measured(blocks: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32)
    return norms.double().square().sum()
