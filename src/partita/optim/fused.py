"""Optimizers whose update is one kernel: it unscales and clips the gradient, and writes states and 16-bit parameter.

They are ``torch.optim.Optimizer`` objects, so learning rates, groups and schedulers work as usual. In place of ``p``
and ``p.grad`` they use :class:`Operands`, for weights that are not one tensor (split master weights) and gradients of
another dtype than the weights.

Source of the 8-bit states: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; the encoding is
:mod:`partita.kernels.quantize`'s own.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from partita.kernels.quantize import encode
from partita.kernels.state import AdamRule, LionRule, Moments, SgdRule, Weights, num_blocks
from partita.kernels.update import adam_, lion_, sgd_
from partita.optim.optimizer import LeasedWeights, TorchRule, UpdateRule
from partita.optim.states import BLOCK_STATES, View, decoded, flat
from partita.optim.traits import runs_on_slices
from partita.sharding.segment import Segment
from partita.table.residence import FP32


@dataclass(frozen=True)
class Operands:
    """The operands of one parameter's update: flat weights, a flat gradient, and its factor."""

    weights: Weights
    grad: Tensor
    factor: float


class FusedOptimizer(Optimizer):
    """Base class: updates the parameters in :attr:`operands`, and fp32 parameters with a gradient.

    The ``settings`` of groups have the same names as in torch's optimizers.

    Attributes: ``operands`` by parameter, which a step removes as it uses them, and ``threads`` that a kernel may use
    on the CPU.
    """

    def __init__(self, params: Iterable[nn.Parameter], **settings: Any) -> None:
        super().__init__(params, settings)
        self.operands: dict[Tensor, Operands] = {}
        self.threads = torch.get_num_threads()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has operands or a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                operands = self.operands.pop(param, None) or _own_operands(param)
                if operands is not None:
                    self._update(operands, self._state(param, group), group)
        return loss

    def _state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        dtypes = self._dtypes(group)
        if any(key not in state for key in dtypes):
            state.update({key: _zeros(key, param, dtype) for key, dtype in dtypes.items()})
        state["step"] += 1
        return state

    @abstractmethod
    def _dtypes(self, group: dict[str, Any]) -> dict[str, torch.dtype]:
        """Return the dtypes of the states that an update needs, by key. They depend on the group's settings."""

    @abstractmethod
    def _update(self, operands: Operands, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Run the kernel."""


@runs_on_slices
class FusedAdam(FusedOptimizer):
    """Adam, or with ``decoupled`` weight decay AdamW; with ``int8`` its moments are 8-bit codes in blocks."""

    def __init__(
        self, params: Iterable[nn.Parameter], *, decoupled: bool = True, int8: bool = False, **settings: Any
    ) -> None:
        self._decoupled = decoupled
        self.int8 = int8
        super().__init__(params, **settings)

    def _dtypes(self, group: dict[str, Any]) -> dict[str, torch.dtype]:
        if self.int8:
            return {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8, **dict.fromkeys(BLOCK_STATES, torch.float32)}
        return {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}

    def _update(self, operands: Operands, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        rule = AdamRule(
            lr=float(group["lr"]),
            step=int(state["step"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=self._decoupled,
        )
        scales = [state.get(key) for key in BLOCK_STATES]
        moments = Moments(flat(state["exp_avg"]), flat(state["exp_avg_sq"]), *scales)
        adam_(operands.weights, moments, operands.grad, rule, operands.factor, self.threads)


@runs_on_slices
class FusedSGD(FusedOptimizer):
    """Stochastic gradient descent with momentum."""

    def _dtypes(self, group: dict[str, Any]) -> dict[str, torch.dtype]:
        return {"momentum_buffer": torch.float32} if group["momentum"] else {}

    def _update(self, operands: Operands, state: dict[str, Any], group: dict[str, Any]) -> None:
        rule = SgdRule(float(group["lr"]), group["momentum"], group["weight_decay"])
        momentum = flat(state["momentum_buffer"]) if rule.momentum else None
        sgd_(operands.weights, momentum, operands.grad, rule, operands.factor, self.threads)


@runs_on_slices
class FusedLion(FusedOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    def _dtypes(self, group: dict[str, Any]) -> dict[str, torch.dtype]:
        return {"exp_avg": torch.float32}

    def _update(self, operands: Operands, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        rule = LionRule(float(group["lr"]), beta1, beta2, group["weight_decay"])
        lion_(operands.weights, flat(state["exp_avg"]), operands.grad, rule, operands.factor, self.threads)


class KernelRule(UpdateRule[FusedOptimizer]):
    """The rule of optimizers whose update is one kernel."""

    always_overlaps = True

    def writes_param(self, segment: Segment) -> bool:
        return segment.layout.encoding != FP32

    def connect(self, view: View, grad: Tensor, factor: float, weights: LeasedWeights) -> None:
        own = weights.of(view)
        flat_grad = view.member.flat(grad) if view.member.segment.has_full_master else grad
        self.optimizer.operands[view.tensor] = Operands(own, flat_grad.to(own.like.device), factor)

    def has_updated(self, view: View) -> bool:
        return view.tensor not in self.optimizer.operands

    def disconnect(self) -> None:
        self.optimizer.operands.clear()


def rule_for(optimizer: Optimizer) -> UpdateRule[FusedOptimizer] | UpdateRule[Optimizer]:
    """Return the rule of an optimizer."""
    return KernelRule(optimizer) if isinstance(optimizer, FusedOptimizer) else TorchRule(optimizer)


def rule_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's update rule, the same for torch's class and the fused one."""
    if isinstance(optimizer, FusedAdam):
        return "adamw" if optimizer._decoupled else "adam"
    return type(optimizer).__name__.removeprefix("Fused").casefold()


def convert_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Convert a parameter's flat state, of another optimizer with the same rule, to the encoding of this optimizer.

    8-bit moments are decoded, or moments are encoded in 8 bits (with stochastic rounding, as in an update), if needed.
    """
    if not isinstance(optimizer, FusedAdam) or not optimizer.int8:
        return decoded(state)
    if "exp_avg" not in state or "exp_avg_sq" not in state or BLOCK_STATES[0] in state:
        return state
    encoded = encode(state["exp_avg"].float(), state["exp_avg_sq"].float(), int(state["step"]))
    return {**state, **dict(zip(("exp_avg", "exp_avg_sq", *BLOCK_STATES), encoded, strict=True))}


def _own_operands(param: Tensor) -> Operands | None:
    if param.grad is None:
        return None
    grad = param.grad if param.grad.stride() == param.stride() else torch.empty_like(param).copy_(param.grad)
    return Operands(Weights(master=flat(param.detach())), flat(grad), 1.0)


def _zeros(key: str, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a state before the first update: in the parameter's shape, or with one value per block."""
    if key in BLOCK_STATES:
        return param.new_zeros(num_blocks(param.numel()), dtype=dtype)
    return torch.zeros_like(param, dtype=dtype)
