"""Losses that read logits [samples, positions, classes] in ways of which PyTorch does not notify subclasses."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Loss = Callable[[Tensor, Tensor], Tensor]


class OwnLoss(torch.autograd.Function):
    """Loss with a hand-written gradient, like fused losses; PyTorch does not notify a subclass that it is read."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        chances = torch.softmax(logits.float(), -1)
        ctx.save_for_backward(chances, targets)
        return -chances.gather(1, targets[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        chances, targets = ctx.saved_tensors
        d_logits = chances.clone()
        d_logits[torch.arange(len(targets)), targets] -= 1
        return d_logits * gradients[0] / len(targets), None


def own_loss(z: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = OwnLoss.apply(z.flatten(0, 1), y.flatten().clamp(min=0))  # type: ignore[no-untyped-call]
    return loss


def hooked(z: Tensor, y: Tensor) -> Tensor:
    z.register_hook(lambda d_logits: d_logits * torch.linspace(0, 1, z.shape[-1]))
    return F.cross_entropy(z.transpose(1, 2), y) + own_loss(z, y)


def with_penalty(z: Tensor, y: Tensor) -> Tensor:
    """Return the sum of the logits, weighted by the gradient of their loss."""
    z.retain_grad()
    loss = F.cross_entropy(z.transpose(1, 2), y)
    loss.backward(retain_graph=True)
    assert z.grad is not None
    return (z * z.grad).sum()


def with_gradient(z: Tensor, y: Tensor) -> Tensor:
    z.retain_grad()
    (d_logits,) = torch.autograd.grad(own_loss(z, y), z)
    return (z * d_logits).sum()


def read_before(z: Tensor, y: Tensor) -> Tensor:
    """Read the logits first without gradients, then for a loss, with gradients."""
    with torch.no_grad():
        right = z.argmax(-1) == y
    return -z.log_softmax(-1)[..., 0][~right].mean()


UNSEEN: dict[str, Loss] = {
    "a function with its own gradient": own_loss,
    "the same, of other logits": lambda z, y: own_loss(torch.tanh(z.transpose(0, 1) / 2)[1:], y.t()[1:]),
    "beside a loss in tiles": lambda z, y: F.cross_entropy(z.transpose(1, 2), y) + own_loss(z, y),
    "a reentrant checkpoint": lambda z, y: checkpoint(
        lambda x: F.cross_entropy(x.flatten(0, 1), y.flatten()), z, use_reentrant=True
    ),
    "vmap": lambda z, y: torch.vmap(lambda row: torch.logsumexp(row, -1).mean())(z).sum(),
    "a hook on logits": hooked,
    "a gradient of the loss": with_gradient,
    "gradients of logits": with_penalty,
    "read before": read_before,
}
