"""Optimizer updates in one pass: scale the gradient, update weights and moments in place, write the 16-bit parameter.

CPU tensors are updated by the C++ kernels of csrc/, GPU tensors by :mod:`partita.kernels.triton`. If the kernels are
not compiled, or Triton is not installed, :mod:`partita.kernels.reference` runs. All give the same bits (with 8-bit
moments: if all values are finite), for any number of threads, any instruction set, and any split of a buffer at
multiples of ``QUANTUM``. All arithmetic is float32 with one rounding per operation (no fused multiply-add). Subnormal
moments become zero. Autograd's version counters are not updated.

Each function returns True if every element of ``grad * factor`` was finite: a bool, or a bool tensor on the weights'
device, so that only a caller that reads it synchronizes. The weights are updated in either case.
"""

from types import ModuleType
from typing import cast

from torch import Tensor

from partita.errors import PartitaError
from partita.kernels import native, reference
from partita.kernels.state import GRADIENTS, AdamRule, LionRule, Moments, SgdRule, Weights, check
from partita.memory.accelerator import runs_triton


def adam_(
    weights: Weights,
    moments: Moments,
    grad: Tensor,
    rule: AdamRule,
    factor: float = 1.0,
    threads: int = 1,
    level: str | None = None,
) -> bool | Tensor:
    """Take one step of Adam or AdamW.

    Args:
        grad: fp32, bf16 or fp16, with as many elements as the weights.
        factor: factor of each gradient: the clipping factor / loss scale.
        threads: at least 1; without compiled kernels, torch's own threads are used.
        level: the instruction set (see :func:`partita.kernels.native.levels`); by default the widest.

    Raises:
        PartitaError: a tensor has the wrong dtype, length or device, or there is no such instruction set.
    """
    check("grad", grad, GRADIENTS, weights.like)
    check("exp_avg", moments.exp_avg, (moments.exp_avg.dtype,), weights.like)
    kernels = native.kernels_for(weights.like)
    if kernels is None:
        return cast(Tensor, _fallback_module(weights.like).adam_(weights, moments, grad, rule, factor))
    exp_avg, exp_avg_sq, scale, scale_sq = (
        native.address(tensor)
        for tensor in (moments.exp_avg, moments.exp_avg_sq, moments.exp_avg_scale, moments.exp_avg_sq_scale)
    )
    constants = [
        *(rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2),
        *(rule.step_size, rule.inv_sqrt_bias2, rule.eps, rule.keep, rule.l2),
    ]
    done: bool = kernels.adam(
        native.launch(grad.numel(), threads, level),
        native.weights_of(weights),
        (exp_avg, exp_avg_sq, scale, scale_sq),
        (*native.typed(grad), factor),
        constants,
        rule.step % 2**32,
    )
    return done


def sgd_(
    weights: Weights,
    momentum_buffer: Tensor | None,
    grad: Tensor,
    rule: SgdRule,
    factor: float = 1.0,
    threads: int = 1,
    level: str | None = None,
) -> bool | Tensor:
    """Take one step of stochastic gradient descent.

    ``momentum_buffer`` (fp32, initially zeros) is required if ``rule.momentum`` is not 0, and must be None otherwise.
    The other arguments and errors are those of :func:`adam_`.
    """
    check("grad", grad, GRADIENTS, weights.like)
    if (momentum_buffer is None) != (rule.momentum == 0):
        expected, got = ("a", "none") if rule.momentum else ("no", "one")
        raise PartitaError(f"momentum {rule.momentum:g} needs {expected} momentum_buffer, got {got}")
    if momentum_buffer is not None:
        check("momentum_buffer", momentum_buffer, GRADIENTS[:1], weights.like)
    kernels = native.kernels_for(weights.like)
    if kernels is None:
        return cast(Tensor, _fallback_module(weights.like).sgd_(weights, momentum_buffer, grad, rule, factor))
    done: bool = kernels.sgd(
        native.launch(grad.numel(), threads, level),
        native.weights_of(weights),
        native.address(momentum_buffer),
        (*native.typed(grad), factor),
        [rule.lr, rule.momentum, rule.weight_decay],
    )
    return done


def lion_(
    weights: Weights,
    exp_avg: Tensor,
    grad: Tensor,
    rule: LionRule,
    factor: float = 1.0,
    threads: int = 1,
    level: str | None = None,
) -> bool | Tensor:
    """Take one step of Lion. ``exp_avg`` is fp32, initially zeros. The rest is as in :func:`adam_`."""
    check("grad", grad, GRADIENTS, weights.like)
    check("exp_avg", exp_avg, GRADIENTS[:1], weights.like)
    kernels = native.kernels_for(weights.like)
    if kernels is None:
        return cast(Tensor, _fallback_module(weights.like).lion_(weights, exp_avg, grad, rule, factor))
    done: bool = kernels.lion(
        native.launch(grad.numel(), threads, level),
        native.weights_of(weights),
        native.address(exp_avg),
        (*native.typed(grad), factor),
        [rule.lr, rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, rule.keep],
    )
    return done


def _fallback_module(like: Tensor) -> ModuleType:
    """Return the module that updates tensors on devices that the compiled kernels do not support."""
    if not runs_triton(like.device):
        return reference
    from partita.kernels.triton import update  # not every machine has Triton

    return update
