"""1-bit Adam: the second moment is measured in a warm-up and frozen after it, so that all that the ranks have to tell
each other from then on is the running average of gradients, which a few bits and error feedback can carry.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021,
algorithm 1. Two guards are not in it: after the warm-up an element whose second moment is zero stays as it is (codes
of signs cannot say zero), and no element moves by more than the learning rate. Weight decay is decoupled.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.kernels.chunks import in_chunks
from partita.optim.traits import runs_on_slices


@runs_on_slices
class OnebitAdam(Optimizer):
    """Adam, whose second moment is left alone while a group is ``frozen``. Where it is also ``averaged``, what comes as
    gradients are the new running averages.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "frozen": False, "averaged": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            averages = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), **averages)
        if not group["frozen"]:
            state["step"] += 1
        num = max(float(state["step"]), 1.0)
        for weights, new, average, second in in_chunks(param, grad, state["exp_avg"], state["exp_avg_sq"]):
            update_moments(average, second, new, group)
            change = change_of(average, second, 1 - beta2**num, group)
            if not group["frozen"]:
                change /= 1 - beta1**num
            weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])


def update_moments(average: Tensor, second: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
    """Take a gradient (where a group is ``averaged``: the new average) into the moments that are not frozen."""
    beta1, beta2 = group["betas"]
    if group["averaged"]:
        average.copy_(grad)
    else:
        average.lerp_(grad, 1 - beta1)
    if not group["frozen"]:
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)


def change_of(average: Tensor, second: Tensor, correction: float, group: Mapping[str, Any]) -> Tensor:
    """How far elements move at a learning rate of 1; where the group is frozen, by at most 1, and by 0 where the second
    moment is.

    Args:
        correction: of the second moment's bias, which is divided by it.
    """
    measured = torch.threshold(second, 0, torch.inf) if group["frozen"] else second
    deviation = (measured / correction).sqrt_().add_(group["eps"])
    change = torch.div(average, deviation, out=deviation)
    return change.clamp_(-1, 1) if group["frozen"] else change
