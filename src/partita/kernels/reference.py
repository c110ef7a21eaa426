"""Every update in plain torch: the definition of the result for any device, and the fallback without compiled kernels.

The results equal those of the C++ kernels bit by bit: float32, one rounding per operation, in the same order.
Temporaries are as large as a chunk, not as the buffer.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from partita.kernels.chunks import chunks
from partita.kernels.quantize import decode_signed, decode_unsigned, encode, join, nearest_bf16, split
from partita.kernels.state import AdamRule, LionRule, Moments, SgdRule, Weights
from partita.table.span import QUANTUM

TINY = torch.finfo(torch.float32).tiny


def adam_(weights: Weights, moments: Moments, grad: Tensor, rule: AdamRule, factor: float) -> Tensor:
    """Update as :func:`partita.kernels.update.adam_` does."""

    def update(p: Tensor, g: Tensor, at: slice) -> Tensor:
        if rule.l2:
            g = g + rule.l2 * p
        old_m, old_v = _decayed(moments, at, rule)
        m = old_m + g * (1.0 - rule.beta1)
        v = old_v + g * g * (1.0 - rule.beta2)
        if moments.exp_avg_scale is None:
            m, v = _flush(m), _flush(v)
        p = p * rule.keep - m * rule.step_size / (_root(v) * rule.inv_sqrt_bias2 + rule.eps)
        _keep_moments(moments, at, m, v, rule.step)
        return p

    return _step(weights, grad, factor, update)


def sgd_(weights: Weights, momentum_buffer: Tensor | None, grad: Tensor, rule: SgdRule, factor: float) -> Tensor:
    """Update as :func:`partita.kernels.update.sgd_` does."""

    def update(p: Tensor, g: Tensor, at: slice) -> Tensor:
        if rule.weight_decay:
            g = g + rule.weight_decay * p
        if momentum_buffer is None:
            return p - rule.lr * g
        m = _flush(momentum_buffer[at] * rule.momentum + g)
        momentum_buffer[at] = m
        return p - rule.lr * m

    return _step(weights, grad, factor, update)


def lion_(weights: Weights, exp_avg: Tensor, grad: Tensor, rule: LionRule, factor: float) -> Tensor:
    """Update as :func:`partita.kernels.update.lion_` does."""

    def update(p: Tensor, g: Tensor, at: slice) -> Tensor:
        m = exp_avg[at]
        direction = m * rule.beta1 + g * (1.0 - rule.beta1)
        exp_avg[at] = _flush(m * rule.beta2 + g * (1.0 - rule.beta2))
        # NaN has no sign: propagate it.
        step = torch.where(direction.isnan(), direction, rule.lr * direction.sign())
        return p * rule.keep - step

    return _step(weights, grad, factor, update)


def _step(weights: Weights, grad: Tensor, factor: float, update: Callable[[Tensor, Tensor, slice], Tensor]) -> Tensor:
    """Run an update over the weights in chunks; return a bool tensor that is True if the gradient was finite."""
    finite = torch.ones((), dtype=torch.bool, device=grad.device)
    for at in chunks(weights.like):
        g = grad[at].float() * factor
        finite &= g.isfinite().all()
        _put(weights, at, update(_master(weights, at), g, at))
    return finite


def _master(weights: Weights, at: slice) -> Tensor:
    if weights.master is not None:
        return weights.master[at]
    assert weights.param is not None
    assert weights.low is not None
    return join(weights.param[at], weights.low[at])


def _put(weights: Weights, at: slice, p: Tensor) -> None:
    if weights.master is not None:
        weights.master[at] = p
    if weights.low is not None and weights.param is not None:
        weights.param[at], weights.low[at] = split(p)
    elif weights.param is not None:
        weights.param[at] = nearest_bf16(p) if weights.param.dtype == torch.bfloat16 else p.half()


def _decayed(moments: Moments, at: slice, rule: AdamRule) -> tuple[Tensor, Tensor]:
    """Return both moments times their betas."""
    if moments.exp_avg_scale is None or moments.exp_avg_sq_scale is None:
        return moments.exp_avg[at] * rule.beta1, moments.exp_avg_sq[at] * rule.beta2
    blocks = _blocks(at)
    return (
        decode_signed(moments.exp_avg[at], moments.exp_avg_scale[blocks], rule.beta1),
        decode_unsigned(moments.exp_avg_sq[at], moments.exp_avg_sq_scale[blocks], rule.beta2),
    )


def _keep_moments(moments: Moments, at: slice, m: Tensor, v: Tensor, step: int) -> None:
    if moments.exp_avg_scale is None or moments.exp_avg_sq_scale is None:
        moments.exp_avg[at], moments.exp_avg_sq[at] = m, v
        return
    first, second, first_scale, second_scale = encode(m, v, step)
    blocks = _blocks(at)
    moments.exp_avg[at], moments.exp_avg_sq[at] = first, second
    moments.exp_avg_scale[blocks], moments.exp_avg_sq_scale[blocks] = first_scale, second_scale


def _blocks(at: slice) -> slice:
    return slice(at.start // QUANTUM, -(-at.stop // QUANTUM))


def _root(values: Tensor) -> Tensor:
    """Return the correctly rounded square root: torch's float32 root may be wrong in the last bit."""
    return values.double().sqrt().float()


def _flush(values: Tensor) -> Tensor:
    """Set subnormal values to zero: rounding would stop their decay, and CPUs are slow with them."""
    return torch.where(values.abs() < TINY, 0.0, values)
