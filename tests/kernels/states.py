"""Random weights, moments and gradients in every form, and functions to update and compare them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from partita.kernels.quantize import encode, join, nearest_bf16, split
from partita.kernels.state import AdamRule, LionRule, Moments, SgdRule, Weights
from partita.kernels.update import adam_, lion_, sgd_

FORMS = ("fp32", "fp32 and bf16", "fp32 and fp16", "split")
GRADS = (torch.float32, torch.bfloat16, torch.float16)
# Sizes near that of a vector and of a block, and one that several threads share.
SIZES = (1, 15, 255, 256, 257, 1000, 4096 * 3 + 77)

ADAM = AdamRule(lr=1e-3, step=3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
RULES = (
    ADAM,
    replace(ADAM, decoupled=False),
    replace(ADAM, weight_decay=0.0, step=1),
    SgdRule(lr=1e-2),
    SgdRule(lr=1e-2, momentum=0.9, weight_decay=0.1),
    SgdRule(lr=1e-2, momentum=0.9),
    LionRule(lr=1e-3, weight_decay=0.1),
)
Rule = AdamRule | SgdRule | LionRule


@dataclass(frozen=True)
class State:
    """Weights and moments of one buffer. A rule uses only the moments that it needs."""

    weights: Weights
    moments: Moments

    @property
    def tensors(self) -> dict[str, Tensor]:
        parts = [(part, field.name) for part in (self.weights, self.moments) for field in fields(part)]
        return {name: tensor for part, name in parts if (tensor := getattr(part, name)) is not None}

    @property
    def master(self) -> Tensor:
        weights = self.weights
        return join(weights.param, weights.low) if weights.master is None else weights.master

    def clone(self) -> "State":
        return self.map(lambda tensor, _: tensor.clone())

    def cut(self, start: int, stop: int) -> "State":
        """Return views of a range of elements, which begins and ends with a block."""
        blocks = slice(start // 256, -(-stop // 256))
        return self.map(lambda tensor, is_scale: tensor[blocks] if is_scale else tensor[start:stop])

    def map(self, change: Callable[[Tensor, bool], Tensor]) -> "State":
        def changed(part: Weights | Moments) -> dict[str, Tensor | None]:
            values = {field.name: getattr(part, field.name) for field in fields(part)}
            return {name: None if v is None else change(v, name.endswith("scale")) for name, v in values.items()}

        return State(Weights(**changed(self.weights)), Moments(**changed(self.moments)))


def make(num: int, form: str, *, coded: bool = False) -> State:
    """Return random weights of magnitude 1, and moments of gradients of magnitude 0.1, some of them zero."""
    return State(weights_of(torch.randn(num), form), moments_of(*random_moments(num), coded=coded))


def weights_of(master: Tensor, form: str) -> Weights:
    if form == "split":
        param, low = split(master)
        return Weights(param=param, low=low)
    if form == "fp32":
        return Weights(master=master)
    param = nearest_bf16(master) if form == "fp32 and bf16" else master.half()
    return Weights(param=param, master=master)


def random_moments(num: int) -> tuple[Tensor, Tensor]:
    spread = 0.1 * torch.rand(num).square()
    spread[torch.rand(num) < 0.05] = 0
    return torch.randn(num) * spread, torch.rand(num) * spread.square()


def moments_of(exp_avg: Tensor, exp_avg_sq: Tensor, *, coded: bool) -> Moments:
    return Moments(*encode(exp_avg, exp_avg_sq, step=2)) if coded else Moments(exp_avg, exp_avg_sq)


def random_grad(num: int, dtype: torch.dtype) -> Tensor:
    grad = torch.randn(num) * torch.rand(num)
    grad[torch.rand(num) < 0.05] = 0
    return grad.to(dtype)


def step(
    state: State, grad: Tensor, rule: Rule, factor: float = 1.0, threads: int = 1, level: str | None = None
) -> bool:
    """Update ``state`` by the kernel of ``rule``; return False if a gradient is not finite."""
    match rule:
        case AdamRule():
            return adam_(state.weights, state.moments, grad, rule, factor, threads, level)
        case SgdRule():
            buffer = state.moments.exp_avg if rule.momentum else None
            return sgd_(state.weights, buffer, grad, rule, factor, threads, level)
        case LionRule():
            return lion_(state.weights, state.moments.exp_avg, grad, rule, factor, threads, level)


def assert_same_bits(one: State, other: State) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert same_bits(tensor, other.tensors[name]), f"{name}: {differing(tensor, other.tensors[name])}"


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def differing(one: Tensor, other: Tensor) -> str:
    places = (one.double() != other.double()).nonzero().flatten()
    shown = [(int(i), one[i].item(), other[i].item()) for i in places[:3]]
    return f"{len(places)} of {len(one)} differ, at first {shown}"


def all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
