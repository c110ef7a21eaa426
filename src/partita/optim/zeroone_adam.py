"""0/1 Adam: without a warm-up, the second moment is refreshed at steps that become rarer, in which gradients travel in
full, and between which the running average of gradients travels as codes.

Source: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", 2022, algorithm 1
(here the k-th and the next refresh are 2^floor(k / refresh) steps apart). Here all ranks meet in every step: the
local steps of the paper are not. Two guards are not in it, as in :mod:`partita.optim.onebit_adam`; both averages are
corrected for their start. Weight decay is decoupled.
"""

from typing import Any

import torch
from torch import Tensor

from partita.kernels.chunks import in_chunks
from partita.optim.onebit_adam import OnebitAdam, change_of, update_moments
from partita.optim.traits import runs_on_slices


@runs_on_slices
class RefreshedAdam(OnebitAdam):
    """Its averages count every step, and its second moments the steps in which they are refreshed."""

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            averages = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state.update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), refreshes=0, **averages)
        state["step"] += 1
        if not group["frozen"]:
            state["refreshes"] += 1
        correction1, correction2 = 1 - beta1 ** float(state["step"]), 1 - beta2 ** max(state["refreshes"], 1)
        for weights, new, average, second in in_chunks(param, grad, state["exp_avg"], state["exp_avg_sq"]):
            update_moments(average, second, new, group)
            change = change_of(average / correction1, second, correction2, group)
            weights.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])
