"""The updates of :mod:`partita.kernels.update` in Triton: every state is read once and written once.

The results equal those of :mod:`partita.kernels.reference` bit by bit, except for non-finite 8-bit moments. Each
operation is rounded once in float32, in the same order; the compiler must not fuse products and sums. A program
processes a tile of blocks of ``QUANTUM`` elements, one block per row, because 8-bit moments have one scale per block.

Bytes moved per parameter by AdamW with a bf16 gradient: 26 with a split master (4 + 8 read and written, 2 read), 14
with 8-bit moments too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from partita.kernels.quantize import LEAST_SCALE, SIGNED_RANGE, UNSIGNED_RANGE
from partita.kernels.state import AdamRule, LionRule, Moments, SgdRule, Weights, num_blocks
from partita.memory.accelerator import on_device
from partita.table.span import QUANTUM

# Blocks and warps per program. With these, a thread accesses 16-bit values in vectors of 16 bytes.
ROWS, WARPS = 4, 4

# The constants of :mod:`partita.kernels.quantize` for kernels.
_QUANTUM = tl.constexpr(QUANTUM)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_CUT, _KEPT, _ONE_CODE, _ONE = (tl.constexpr(number) for number in (19, 13, 1 << 19, 0x3F800000))


def adam_(weights: Weights, moments: Moments, grad: Tensor, rule: AdamRule, factor: float) -> Tensor:
    """Update as :func:`partita.kernels.update.adam_` does."""
    finite = _flag(grad)
    _launch(
        _adam,
        grad,
        *_pointers(weights, grad, finite),
        *(moments.exp_avg, moments.exp_avg_sq),
        *(_or(moments.exp_avg_scale, grad), _or(moments.exp_avg_sq_scale, grad)),
        *(grad.numel(), factor, rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2),
        *(rule.step_size, rule.inv_sqrt_bias2, rule.eps, rule.keep, rule.l2),
        _signed(rule.step * QUANTUM),
        *(_inverse(SIGNED_RANGE), _inverse(UNSIGNED_RANGE), SIGNED_RANGE, UNSIGNED_RANGE),
        **_form(weights),
        is_8bit=moments.exp_avg_scale is not None,
        decays=rule.l2 != 0,
    )
    return finite


def sgd_(weights: Weights, momentum_buffer: Tensor | None, grad: Tensor, rule: SgdRule, factor: float) -> Tensor:
    """Update as :func:`partita.kernels.update.sgd_` does."""
    finite = _flag(grad)
    _launch(
        _sgd,
        grad,
        *_pointers(weights, grad, finite),
        _or(momentum_buffer, grad),
        *(grad.numel(), factor, rule.lr, rule.momentum, rule.weight_decay),
        **_form(weights),
        has_momentum=momentum_buffer is not None,
        decays=rule.weight_decay != 0,
    )
    return finite


def lion_(weights: Weights, exp_avg: Tensor, grad: Tensor, rule: LionRule, factor: float) -> Tensor:
    """Update as :func:`partita.kernels.update.lion_` does."""
    finite = _flag(grad)
    _launch(
        _lion,
        grad,
        *_pointers(weights, grad, finite),
        exp_avg,
        *(grad.numel(), factor, rule.lr, rule.beta1, 1.0 - rule.beta1, rule.beta2, 1.0 - rule.beta2, rule.keep),
        **_form(weights),
    )
    return finite


def _flag(grad: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=grad.device)


def _launch(kernel: Any, grad: Tensor, *args: Any, **constants: Any) -> None:
    programs = -(-num_blocks(grad.numel()) // ROWS)
    if programs:
        with on_device(grad.device):
            kernel[(programs,)](*args, **constants, rows=ROWS, num_warps=WARPS, enable_fp_fusion=False)


def _pointers(weights: Weights, grad: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that every kernel takes. A missing one is replaced by ``grad``, which is not accessed."""
    return _or(weights.param, grad), _or(weights.master, grad), _or(weights.low, grad), grad, finite


def _form(weights: Weights) -> dict[str, bool]:
    return {"splits": weights.low is not None, "writes_param": weights.param is not None and weights.low is None}


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _signed(number: int) -> int:
    """Return the last 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31


def _inverse(reach: float) -> float:
    single = torch.tensor(reach, dtype=torch.float32, device="cpu")
    return float(torch.tensor(1.0 / float(single), dtype=torch.float32, device="cpu"))


# ---------------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def _places(n, rows: tl.constexpr):
    """Return the blocks of this program, their elements, and a mask of the elements inside the buffer."""
    blocks = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    at = blocks[:, None] * _QUANTUM + tl.arange(0, _QUANTUM)[None, :]
    return blocks, at, at < n


@triton.jit
def _load_grad(grad, finite, at, here, factor):
    g = tl.load(grad + at, here, other=0.0).to(tl.float32) * factor
    magnitudes = g.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if tl.max(tl.max(magnitudes, 1), 0) >= 0x7F800000:
        tl.store(finite, 0)
    return g


@triton.jit
def _load_weights(param, master, low, at, here, splits: tl.constexpr):
    if splits:
        high = tl.load(param + at, here, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        return (high + tl.load(low + at, here, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        return tl.load(master + at, here, other=0.0)


@triton.jit
def _nearest_bf16(bits):
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _store_weights(param, master, low, at, here, p, splits: tl.constexpr, writes_param: tl.constexpr):
    bits = p.to(tl.int32, bitcast=True)
    if splits:
        tl.store(param + at, _nearest_bf16(bits), here)
        tl.store(low + at, bits.to(tl.int16), here)
    else:
        tl.store(master + at, p, here)
        if writes_param:
            if param.dtype.element_ty == tl.bfloat16:
                tl.store(param + at, _nearest_bf16(bits), here)
            else:
                tl.store(param + at, p.to(tl.float16), here)


@triton.jit
def _flush(x):
    return tl.where(tl.abs(x) < _TINY, 0.0, x)


@triton.jit
def _dither(salt, m, v):
    """Return 32 random bits for each element."""
    mixed = (tl.arange(0, _QUANTUM) + salt).to(tl.uint32, bitcast=True) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE3D
    mixed = mixed ^ (mixed >> 16)
    return (mixed[None, :] + m.to(tl.uint32, bitcast=True)) ^ (v.to(tl.uint32, bitcast=True) << 16)


@triton.jit
def _decoded(codes, scale, inverse, beta):
    u = ((codes << _CUT) + _ONE).to(tl.float32, bitcast=True)
    return (u - 1.0) * (scale * inverse * beta)[:, None]


@triton.jit
def _encoded(magnitudes, scale, reach, dither):
    """Return the codes, followed by the low bits that the caller truncates."""
    u = magnitudes * tl.div_rn(reach + tl.zeros_like(scale), scale)[:, None] + 1.0
    return u.to(tl.int32, bitcast=True) + dither.to(tl.int32, bitcast=True) - _ONE


@triton.jit
def _adam(
    param, master, low, grad, finite, first, second, first_scale, second_scale,
    n, factor, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, inv_sqrt_bias2, eps, keep, l2, salt,
    first_inverse, second_inverse, first_reach, second_reach,
    splits: tl.constexpr, writes_param: tl.constexpr, is_8bit: tl.constexpr, decays: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    blocks, at, here = _places(n, rows)
    g = _load_grad(grad, finite, at, here, factor)
    p = _load_weights(param, master, low, at, here, splits)
    if decays:
        g = g + l2 * p
    in_use = blocks * _QUANTUM < n
    if is_8bit:
        codes = tl.load(first + at, here, other=0).to(tl.int32)
        m = _decoded(codes & 0x7F, tl.load(first_scale + blocks, in_use, other=1.0), first_inverse, beta1)
        m = tl.where(codes < 0, -m, m)
        codes = tl.load(second + at, here, other=0).to(tl.int32)
        v = _decoded(codes, tl.load(second_scale + blocks, in_use, other=1.0), second_inverse, beta2)
    else:
        m = tl.load(first + at, here, other=0.0) * beta1
        v = tl.load(second + at, here, other=0.0) * beta2
    m = m + g * one_minus_beta1
    v = v + g * g * one_minus_beta2
    if not is_8bit:
        m, v = _flush(m), _flush(v)
    p = p * keep - tl.div_rn(m * step_size, tl.sqrt_rn(v) * inv_sqrt_bias2 + eps)
    if is_8bit:
        m_bits, v_bits = m.to(tl.int32, bitcast=True), v.to(tl.int32, bitcast=True)
        dither = _dither(salt, m_bits, v_bits)
        scale = tl.maximum(tl.max(tl.where(here, tl.abs(m), 0.0), 1), _LEAST_SCALE)
        codes = _encoded(tl.abs(m), scale, first_reach, dither >> _KEPT) >> _CUT
        codes = codes | (m_bits >> 24 & 0x80)
        tl.store(first + at, codes.to(tl.int8), here)
        tl.store(first_scale + blocks, scale, in_use)
        scale = tl.maximum(tl.max(tl.where(here, v, 0.0), 1), _LEAST_SCALE)
        codes = _encoded(v, scale, second_reach, dither & (_ONE_CODE - 1))
        codes = tl.maximum(codes, tl.minimum(v_bits, _ONE_CODE)) >> _CUT
        tl.store(second + at, codes.to(tl.uint8), here)
        tl.store(second_scale + blocks, scale, in_use)
    else:
        tl.store(first + at, m, here)
        tl.store(second + at, v, here)
    _store_weights(param, master, low, at, here, p, splits, writes_param)


@triton.jit
def _sgd(
    param, master, low, grad, finite, buffer, n, factor, lr, momentum, weight_decay,
    splits: tl.constexpr, writes_param: tl.constexpr, has_momentum: tl.constexpr, decays: tl.constexpr,
    rows: tl.constexpr,
):  # fmt: skip
    _, at, here = _places(n, rows)
    g = _load_grad(grad, finite, at, here, factor)
    p = _load_weights(param, master, low, at, here, splits)
    if decays:
        g = g + weight_decay * p
    if has_momentum:
        g = _flush(tl.load(buffer + at, here, other=0.0) * momentum + g)
        tl.store(buffer + at, g, here)
    _store_weights(param, master, low, at, here, p - lr * g, splits, writes_param)


@triton.jit
def _lion(
    param, master, low, grad, finite, first, n, factor, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, keep,
    splits: tl.constexpr, writes_param: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    _, at, here = _places(n, rows)
    g = _load_grad(grad, finite, at, here, factor)
    p = _load_weights(param, master, low, at, here, splits)
    m = tl.load(first + at, here, other=0.0)
    direction = m * beta1 + g * one_minus_beta1
    tl.store(first + at, _flush(m * beta2 + g * one_minus_beta2), here)
    # NaN has no sign: propagate it.
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, tl.where(direction == 0, 0.0, direction)))
    _store_weights(param, master, low, at, here, p * keep - lr * sign, splits, writes_param)
