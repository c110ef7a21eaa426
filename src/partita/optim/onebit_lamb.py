"""1-bit LAMB: LAMB in a warm-up, in which the second moment and each parameter's trust ratio are measured; after it the
running average travels as codes, and the trust ratio is what it was, times how the second moment has changed since.

Source: Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed",
2021, algorithm 1 and section 4. Its scales of momenta, by which those of all parameters have one size, are left out:
codes here have a scale for each block. The two guards are those of :mod:`partita.optim.onebit_adam`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partita.optim.onebit_adam import OnebitAdam
from partita.optim.traits import runs_on_slices
from partita.planner.blueprint import NUMBERS
from partita.sharding.squares import square

# Trust ratios lie between these (You et al., "LAMB", 2020, have a bound on the weights' norm in their place).
LEAST_TRUST, MOST_TRUST = 0.01, 10.0
# Decay of the running average of trust ratios in the warm-up.
TRUST_DECAY = 0.9
# After it: what multiplies the average lies between these, and changes by no more than so much of itself in a step.
LEAST_FACTOR, MOST_FACTOR, FACTOR_CHANGE = 0.5, 4.0, 0.1
NOT_TOLD = -1.0


@runs_on_slices
class OnebitLamb(OnebitAdam):
    """LAMB, whose second moment and trust ratios are left alone while a group is ``frozen``. A trust ratio is of a
    whole parameter: where this rank has a piece, what pieces :meth:`measure` is added up over the ranks, and
    :meth:`trust` is told the sums before the step. Without that a step measures what it has.
    """

    def group_of(self) -> dict[Tensor, dict[str, Any]]:
        """The group of each parameter."""
        return {param: group for group in self.param_groups for param in group["params"]}

    @torch.no_grad()
    def measure(
        self,
        param: Tensor,
        grad: Tensor,
        group: dict[str, Any],
        piece: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> Tensor:
        """``[NUMBERS]`` in float64 of one update to come: the squares of weights and update, which add up over pieces,
        and the largest quotient of frozen and fresh divisors, of which the largest counts.

        Args:
            grad: of the piece, flat; where averages travel, the new average.
            piece: takes the piece, flat, out of what is like ``param``.
        """
        state = self._state_of(param)
        update, largest = self._update_of({key: piece(state[key]) for key in _PER_ELEMENT}, state, grad, group)
        weights, found = piece(param.detach()), torch.zeros(NUMBERS, dtype=torch.float64, device=param.device)
        if not group["frozen"]:
            found[0] = square(weights)
            found[1] = square(update.add_(weights, alpha=group["weight_decay"]))
        found[2] = largest
        return found

    @torch.no_grad()
    def trust(self, param: Tensor, measured: Tensor, group: dict[str, Any]) -> None:
        """Take up what all pieces of a parameter came to, for the step that comes."""
        state, (weights, update, largest) = self._state_of(param), measured.tolist()
        if group["frozen"]:
            last = state["factor"]
            within = (max(LEAST_FACTOR, last * (1 - FACTOR_CHANGE)), min(MOST_FACTOR, last * (1 + FACTOR_CHANGE)))
            state["factor"] = min(max(largest or 1.0, within[0]), within[1])
            state["ratio"] = state["trust"] * state["factor"]
            return
        ratio = min(max((weights / update) ** 0.5, LEAST_TRUST), MOST_TRUST) if weights and update else 1.0
        is_first = not float(state["step"])
        state["trust"] = ratio if is_first else TRUST_DECAY * state["trust"] + (1 - TRUST_DECAY) * ratio
        state["ratio"] = ratio

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state.update({key: torch.zeros_like(param) for key in _PER_ELEMENT})
            # Updates in the warm-up and in all, the running average of trust ratios, what multiplied that in the last
            # step, and the ratio of the step that comes.
            num_steps = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state.update(step=num_steps, updates=0, trust=0.0, factor=1.0, ratio=NOT_TOLD)
        return state

    @staticmethod
    def _update_of(
        values: dict[str, Tensor], state: dict[str, Any], grad: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor | float]:
        """The update before trust ratio and decay, and the largest quotient of frozen and fresh divisors."""
        beta1, beta2 = group["betas"]
        average, second, fresh = (values[key] for key in _PER_ELEMENT)
        moved = grad.clone() if group["averaged"] else average.lerp(grad, 1 - beta1)
        num = float(state["step"]) + (not group["frozen"])
        if not group["frozen"]:
            second = (second * beta2).addcmul_(grad, grad, value=1 - beta2)
            divisor = (second / (1 - beta2**num)).sqrt_().add_(group["eps"])
            return moved.div_(1 - beta1**num).div_(divisor), 0.0
        divisor = (second / (1 - beta2 ** max(num, 1.0))).sqrt_().add_(group["eps"])
        brought = (moved - beta1 * average) / (1 - beta1)
        fresh = (fresh * beta2).addcmul_(brought, brought, value=1 - beta2)
        fresh = (fresh / (1 - beta2 ** (state["updates"] + 1))).sqrt_().add_(group["eps"])
        quotients = torch.where(second > 0, divisor / fresh, 0)
        largest = quotients.max() if quotients.numel() else 0.0
        return torch.where(second > 0, (moved / divisor).clamp_(-1, 1), 0), largest

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self._state_of(param), group["betas"]
        if state["ratio"] == NOT_TOLD:
            self.trust(param, self.measure(param, grad, group), group)
        update, _ = self._update_of(state, state, grad, group)
        average, second, fresh = (state[key] for key in _PER_ELEMENT)
        before = average.clone()
        if group["averaged"]:
            average.copy_(grad)
        else:
            average.lerp_(grad, 1 - beta1)
        state["updates"] += 1
        if group["frozen"]:
            brought = (average - beta1 * before) / (1 - beta1)
            fresh.mul_(beta2).addcmul_(brought, brought, value=1 - beta2)
        else:
            state["step"] += 1
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            fresh.copy_(second)
        update.add_(param, alpha=group["weight_decay"])
        param.sub_(update, alpha=group["lr"] * state["ratio"])
        state["ratio"] = NOT_TOLD


_PER_ELEMENT = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
