"""1-bit Adam: the second moment is measured in a warm-up and frozen after it, so that all that the ranks have to tell
each other from then on is the running average of gradients, which a few bits and error feedback can carry.

Source: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021,
algorithm 1. Two guards are not in it: after the warm-up an element whose second moment is zero stays as it is (codes
of signs cannot say zero), and no element moves by more than the learning rate. Weight decay is decoupled.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.compression.average import AverageSync
from partita.kernels.chunks import in_chunks
from partita.optim.extension import ComingUpdate, UpdateListener
from partita.optim.traits import runs_on_slices
from partita.optim.views import Views
from partita.sharding.reducer import GradientReducer


@runs_on_slices
class OnebitAdam(Optimizer):
    """Adam whose second moment is measured in a warm-up, and then stays as it is.

    Attributes:
        is_warming_up: the second moment is measured.
        takes_averages: what comes as gradients are the new running averages.
    """

    is_warming_up = True
    takes_averages = False

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

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
        if self.is_warming_up:
            state["step"] += 1
        num = max(float(state["step"]), 1.0)
        for weights, new, average, second in in_chunks(param, grad, state["exp_avg"], state["exp_avg_sq"]):
            self._update_moments(average, second, new, group)
            change = self._change_of(average, second, 1 - beta2**num, group)
            if self.is_warming_up:
                change /= 1 - beta1**num
            weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])

    def _update_moments(self, average: Tensor, second: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        """Take a gradient, or the new average, into the moments."""
        beta1, beta2 = group["betas"]
        if self.takes_averages:
            average.copy_(grad)
        else:
            average.lerp_(grad, 1 - beta1)
        if self.is_warming_up:
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)

    def _change_of(self, average: Tensor, second: Tensor, correction: float, group: Mapping[str, Any]) -> Tensor:
        """Return how far elements move at a learning rate of 1.

        After the warm-up that is at most 1, and 0 where the second moment is.

        Args:
            correction: of the second moment's bias, which is divided by it.
        """
        measured = second if self.is_warming_up else torch.threshold(second, 0, torch.inf)
        deviation = (measured / correction).sqrt_().add_(group["eps"])
        change = torch.div(average, deviation, out=deviation)
        return change if self.is_warming_up else change.clamp_(-1, 1)


class AfterWarmup(UpdateListener):
    """Has the optimizer follow the phases of training."""

    def __init__(self, reducer: GradientReducer, optimizer: OnebitAdam, views: Views) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self._views = views
        self._with_moments = set[str]()  # names of parameters that were looked at after the warm-up

    def before_update(self, coming: ComingUpdate) -> None:
        later = [bucket.syncs[-1] for bucket in self._reducer.buckets]
        has_averages = any(isinstance(sync, AverageSync) for sync in later)
        if not coming.is_warming_up:
            self._warn_of_untrained(coming)
        self._optimizer.is_warming_up = coming.is_warming_up
        self._optimizer.takes_averages = has_averages and not coming.is_warming_up

    def _warn_of_untrained(self, coming: ComingUpdate) -> None:
        """Name parameters without a second moment (they had no update in the warm-up): they do not train."""
        for member in (member for bucket in self._reducer.buckets for member in bucket.members):
            view = self._views.of(member.param)
            is_used = id(member) in coming.used and view is not None and view.num_elements > 0
            if not is_used or member.fqn in self._with_moments or view is None:
                continue
            self._with_moments.add(member.fqn)
            if not float(self._optimizer.state.get(view.tensor, {}).get("step", 0.0)):
                warnings.warn(
                    f"step {coming.step}: '{member.fqn}' had no update in the warm-up of OnebitAdam, so "
                    "its second moment is zero and it does not train; unfreeze it before the warm-up ends, or raise "
                    "communication.warmup_steps",
                    stacklevel=6,
                )
