"""The states that an update works on, and the constants of its rule.

All tensors are flat, contiguous, on one device and have the same number of elements (scales: one per block of
``QUANTUM``). Values are changed in place without updating autograd's version counters.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.table.span import QUANTUM

HALVES = (torch.bfloat16, torch.float16)
GRADIENTS = (torch.float32, *HALVES)


def num_blocks(num_elements: int) -> int:
    """Return the number of blocks; each has one scale, and the last may be shorter."""
    return -(-num_elements // QUANTUM)


@dataclass(frozen=True)
class Weights:
    """Master weights in one of three forms.

    - only ``master`` (fp32);
    - ``master`` and ``param`` (bf16 or fp16), the parameter that is rounded from it: fp16 to nearest, ties to even;
      bf16 to nearest, ties away from zero, as the split form requires;
    - ``param`` (bf16) and ``low`` (int16), which together are the fp32 master (:mod:`partita.kernels.quantize`).

    Raises:
        PartitaError: another combination, or a tensor with the wrong dtype, length or device, or not contiguous.
    """

    param: Tensor | None = None
    master: Tensor | None = None
    low: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.master is None) == (self.low is None) or (self.low is not None and self.param is None):
            given = [name for name, tensor in self._named() if tensor is not None]
            raise PartitaError(
                "weights: expected master, master and param, or param (bf16) and low (the low bits of its master); got "
                f"{' and '.join(given) or 'nothing'}"
            )
        first = self.param if self.master is None else self.master
        assert first is not None
        allowed = {"param": HALVES if self.low is None else HALVES[:1], "master": (torch.float32,)}
        for name, tensor in self._named():
            if tensor is not None:
                check(name, tensor, allowed.get(name, (torch.int16,)), first)

    def _named(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from (("param", self.param), ("master", self.master), ("low", self.low))

    @property
    def like(self) -> Tensor:
        """A tensor that has the weights' length and device."""
        found = self.param if self.master is None else self.master
        assert found is not None
        return found


@dataclass(frozen=True)
class Moments:
    """Adam's moments: fp32, or 8-bit codes (int8 and uint8) with one fp32 scale per block. They are zeros at the start.

    Raises:
        PartitaError: codes without scales or scales without codes, or a tensor with the wrong dtype, length or device.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.exp_avg_scale is None) != (self.exp_avg_sq_scale is None):
            raise PartitaError("moments are both fp32, or both 8-bit codes with scales; got the scale of one")
        is_8bit = self.exp_avg_scale is not None
        check("exp_avg", self.exp_avg, (torch.int8 if is_8bit else torch.float32,), self.exp_avg)
        check("exp_avg_sq", self.exp_avg_sq, (torch.uint8 if is_8bit else torch.float32,), self.exp_avg)
        num = num_blocks(self.exp_avg.numel())
        for name, scale in (("exp_avg_scale", self.exp_avg_scale), ("exp_avg_sq_scale", self.exp_avg_sq_scale)):
            if scale is not None:
                check(name, scale, (torch.float32,), self.exp_avg, num)


@dataclass(frozen=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015), with decoupled weight decay (Loshchilov and Hutter, 2019) or L2 regularization.

    ``step`` counts from 1 and includes this update. As in ``torch.optim.AdamW``, eps is added outside the root.
    """

    lr: float
    step: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        if self.step < 1:
            raise PartitaError(f"Adam's steps count from 1, got {self.step}")

    @property
    def step_size(self) -> float:
        return self.lr / (1.0 - self.beta1**self.step)

    @property
    def inv_sqrt_bias2(self) -> float:
        return 1.0 / math.sqrt(1.0 - self.beta2**self.step)

    @property
    def keep(self) -> float:
        """The factor by which decoupled weight decay multiplies a weight."""
        return 1.0 - self.lr * self.weight_decay if self.decoupled else 1.0

    @property
    def l2(self) -> float:
        """The coefficient of weight decay in the gradient."""
        return 0.0 if self.decoupled else self.weight_decay


@dataclass(frozen=True)
class SgdRule:
    """Stochastic gradient descent as in ``torch.optim.SGD``, without dampening; weight decay is L2 regularization."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class LionRule:
    """Lion (Chen et al., 2023, algorithm 2), with decoupled weight decay."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    @property
    def keep(self) -> float:
        """The factor by which weight decay multiplies a weight."""
        return 1.0 - self.lr * self.weight_decay


def check(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], like: Tensor, num_elements: int | None = None
) -> None:
    """Check that a tensor is contiguous, has one of ``dtypes``, is on the device of ``like`` and has ``num_elements``
    (default: those of ``like``).

    Raises:
        PartitaError: it is not.
    """
    expected = like.numel() if num_elements is None else num_elements
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if tensor.dtype not in dtypes:
        raise PartitaError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.numel() != expected:
        raise PartitaError(f"{name} must have {expected} elements, got {tensor.numel()}")
    if not tensor.is_contiguous():
        raise PartitaError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}; call contiguous()")
    if tensor.device != like.device:
        raise PartitaError(f"{name} must be on {like.device}, like the other tensors, got {tensor.device}")
