"""Two encodings in plain torch, for any device: split masters, and 8-bit moments in blocks.

**Split master.** The bits of an fp32 master are ``(bits of param << 16) + low`` modulo 2^32, where ``param`` is the
bf16 number nearest to the master and ``low`` (int16) the signed remainder, so the master is restored bit by bit. 2^32
masters are 2^16 parameters times 2^16 remainders, so each parameter must have the same number of masters. Therefore
ties are rounded away from zero: rounded to even, even parameters would have 65537 masters and odd ones 65535. So one
master in 131072 has another parameter than torch's cast gives it. For NaN only the master is restored.

**8-bit moments.** A block of ``QUANTUM`` elements has one fp32 scale s, its largest magnitude (at least 2^-100). A
magnitude x becomes u = 1 + x / s * R; cut after 4 bits of mantissa, u's floating-point number is the code. So codes are
16 even steps in each octave of u: 8 octaves and a sign for the first moment (int8, R = 247), 16 octaves for the second
(uint8, R = 63487). Before the cut u gets a random part of a step, so that x is right on average: with beta2 = 0.999 a
moment changes by less than a step at a time and would, rounded to nearest, never change at all. The error is less than
a step: ``|error| < (x + s / R) / 16``, which is 6.25 % of x and s / 3952 (first moment) or s / 1015784 (second). A
second moment above 1.2e-38 never becomes zero, for its root is divided by: at least the largest root / 1008. A signed
code is a sign bit and the magnitude's code.
The random numbers are a function of the step, the place in the block and the values, so a result does not depend on
threads, cuts at multiples of ``QUANTUM``, or what was computed before.
"""

import torch
from torch import Tensor

from partita.table.span import QUANTUM

SIGNED_RANGE, UNSIGNED_RANGE = 246.999, 63486.5
LEAST_SCALE = 2.0**-100
# Mantissa bits of u that are cut off, and the bits of 1.0.
_CUT, _ONE = 19, 0x3F800000
_WORD = 0xFFFFFFFF


def nearest_bf16(master: Tensor) -> Tensor:
    """Return the bf16 parameters of fp32 masters: to nearest, ties away from zero."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bf16 parameters of fp32 masters, and the low bits (int16) that :func:`join` takes to restore them."""
    return nearest_bf16(master), master.view(torch.int32).to(torch.int16)


def join(param: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 masters that :func:`split` was given, bit by bit."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def decode_signed(codes: Tensor, scale: Tensor, beta: float = 1.0) -> Tensor:
    """Return first moments (fp32), times beta, from int8 codes and the scale of each block."""
    values = _decode(codes.to(torch.int32) & 0x7F, scale, SIGNED_RANGE, beta)
    return torch.where(codes < 0, -values, values)


def decode_unsigned(codes: Tensor, scale: Tensor, beta: float = 1.0) -> Tensor:
    """Return second moments (fp32), times beta, from uint8 codes and the scale of each block."""
    return _decode(codes.to(torch.int32), scale, UNSIGNED_RANGE, beta)


def encode(exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 8-bit codes of both moments (fp32, from a block's start on), and the scales of both."""
    dither = _dither(exp_avg, exp_avg_sq, step)
    first_scale, second_scale = _scale(exp_avg), _scale(exp_avg_sq)
    first = _encode(exp_avg.abs(), first_scale, SIGNED_RANGE, dither >> (32 - _CUT)) >> _CUT
    signed = (first | (exp_avg.view(torch.int32) >> 24 & 0x80)).to(torch.uint8).view(torch.int8)
    least = exp_avg_sq.view(torch.int32).clamp_max(1 << _CUT)
    second = _encode(exp_avg_sq, second_scale, UNSIGNED_RANGE, dither & ((1 << _CUT) - 1))
    return signed, (torch.maximum(second, least) >> _CUT).to(torch.uint8), first_scale, second_scale


def _per_element(per_block: Tensor, num_elements: int) -> Tensor:
    return per_block.repeat_interleave(QUANTUM)[:num_elements]


def _decode(codes: Tensor, scale: Tensor, reach: float, beta: float) -> Tensor:
    u = ((codes << _CUT) + _ONE).view(torch.float32)
    return (u - 1.0) * _per_element(scale * _fp32(1.0 / _fp32(reach)) * beta, codes.numel())


def _encode(magnitudes: Tensor, scale: Tensor, reach: float, dither: Tensor) -> Tensor:
    """Return the codes, with the bits below them that are to be cut."""
    # Not `reach / scale`: torch would multiply by a rounded reciprocal.
    u = (
        magnitudes
        * _per_element(torch.div(torch.tensor(reach, dtype=torch.float32, device="cpu"), scale), magnitudes.numel())
        + 1.0
    )
    return u.view(torch.int32) + dither.to(torch.int32) - _ONE


def _scale(values: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % QUANTUM)).view(-1, QUANTUM)
    return blocks.amax(1).clamp_min(LEAST_SCALE)


def _dither(exp_avg: Tensor, exp_avg_sq: Tensor, step: int) -> Tensor:
    """Return 32 random bits per element, as int64."""
    places = torch.arange(QUANTUM, device=exp_avg.device) + step % 2**32 * QUANTUM
    mixed = (places & _WORD) * 0x9E3779B1 & _WORD
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 & _WORD
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE3D & _WORD
    mixed = mixed ^ (mixed >> 16)
    num = exp_avg.numel()
    random = mixed.repeat(-(-num // QUANTUM))[:num]
    first, second = (values.view(torch.int32).to(torch.int64) for values in (exp_avg, exp_avg_sq))
    return ((random + first) ^ (second << 16)) & _WORD


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))
