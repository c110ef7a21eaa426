"""The two encodings: split masters are restored exactly, 8-bit moments within their error bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from partita.kernels.quantize import (
    LEAST_SCALE,
    SIGNED_RANGE,
    UNSIGNED_RANGE,
    decode_signed,
    decode_unsigned,
    encode,
    join,
    nearest_bf16,
    split,
)
from tests.kernels.states import same_bits

seeds = st.integers(0, 2**32 - 1)


def bit_patterns(num: int) -> Tensor:
    """Return fp32 values with uniformly random bits: any magnitude and sign, denormals and NaNs included."""
    return torch.randint(-(2**31), 2**31, (num,), dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_split_restores_every_bit() -> None:
    master = bit_patterns(1 << 20)
    assert same_bits(join(*split(master)), master)


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_split_restores_every_parameter_with_these_low_bits(low: int) -> None:
    """All 2^16 parameters are restored, with low bits at and next to those where rounding changes direction."""
    master = ((torch.arange(1 << 16) << 16) + low).to(torch.int32).view(torch.float32)
    assert same_bits(join(*split(master)), master)


def test_the_parameter_is_the_nearest() -> None:
    master = bit_patterns(1 << 20)
    master = master[master.abs() < 3e38]
    param, torch_s = nearest_bf16(master), master.bfloat16()
    half_way = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert same_bits(param[~half_way], torch_s[~half_way])
    ties = ((torch.arange(-(1 << 15), 1 << 15) << 16) + 0x8000).to(torch.int32).view(torch.float32)
    ties = ties[ties.abs() < 3e38]
    assert (nearest_bf16(ties).double().abs() > ties.double().abs()).all()
    assert ((nearest_bf16(ties).double() - ties).abs() == (ties.bfloat16().double() - ties).abs()).all()


@given(seeds, st.integers(-90, 90), st.integers(0, 20), st.integers(1, 700))
def test_codes_are_within_their_bounds(seed: int, exponent: int, spread: int, num: int) -> None:
    """Errors are within their bounds for any magnitude of the values, and any spread inside a block."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0**exponent * 2.0 ** (-spread * torch.rand(num, generator=generator))
    m = torch.randn(num, generator=generator) * sizes
    v = torch.rand(num, generator=generator) * sizes
    m[torch.rand(num, generator=generator) < 0.1] = 0
    v[torch.rand(num, generator=generator) < 0.1] = 0
    codes_m, codes_v, scale_m, scale_v = encode(m, v, step=seed)
    assert (codes_m.dtype, codes_v.dtype) == (torch.int8, torch.uint8)
    for exact, new, scale, reach in (
        (m, decode_signed(codes_m, scale_m), scale_m, SIGNED_RANGE),
        (v, decode_unsigned(codes_v, scale_v), scale_v, UNSIGNED_RANGE),
    ):
        blocks = torch.nn.functional.pad(exact.abs(), (0, -num % 256)).view(-1, 256)
        assert torch.equal(scale, blocks.amax(1).clamp_min(LEAST_SCALE))
        largest = scale.double().repeat_interleave(256)[:num]
        bound = (exact.double().abs() + largest / reach) / 16 * 1.00001
        assert ((new.double() - exact.double()).abs() <= bound).all()
        assert (new * exact >= 0).all()
    assert torch.equal(codes_v > 0, v > 0)


@given(seeds)
def test_codes_come_back_as_they_are(seed: int) -> None:
    """Decoded values keep their codes, except if rounding of the scale moves one: about one in ten thousand."""
    generator = torch.Generator().manual_seed(seed)
    m = torch.randint(-128, 128, (2560,), generator=generator).to(torch.int8)
    v = torch.randint(0, 256, (2560,), generator=generator).to(torch.uint8)
    scale = torch.rand(10, generator=generator) + 0.5
    m[::256], v[::256] = 127, 255
    m[m == -128] = 0  # minus zero
    again_m, again_v, *_ = encode(decode_signed(m, scale), decode_unsigned(v, scale), step=seed)
    assert torch.equal(again_m < 0, m < 0)
    assert (again_m.int() - m.int()).abs().max() <= 1
    assert (again_v.int() - v.int()).abs().max() <= 1
    assert (again_m != m).sum() + (again_v != v).sum() < 30


def test_the_mean_over_steps_is_right() -> None:
    num, steps = 512, 400
    m, v = torch.randn(num), torch.rand(num).square() + 1e-5  # values near zero are raised, and have another mean
    sum_m, sum_v = torch.zeros(num, dtype=torch.float64), torch.zeros(num, dtype=torch.float64)
    for step in range(1, steps + 1):
        codes_m, codes_v, scale_m, scale_v = encode(m, v, step)
        sum_m += decode_signed(codes_m, scale_m)
        sum_v += decode_unsigned(codes_v, scale_v)
    for exact, total, scale, reach in ((m, sum_m, scale_m, SIGNED_RANGE), (v, sum_v, scale_v, UNSIGNED_RANGE)):
        coarse = (exact.abs() + scale.repeat_interleave(256) / reach) / 16
        # The standard deviation of an error is at most half a code step; the bound is six deviations of the mean.
        assert ((total / steps - exact).abs() < 6 * 0.5 * coarse / steps**0.5).all()


def test_errors_of_neighbouring_blocks_are_not_alike() -> None:
    """Errors of blocks are uncorrelated: their random numbers are equal, but mixed with the last bits of the values."""
    m, v = torch.rand(512) + 0.5, torch.rand(512) + 0.5
    codes_m, codes_v, scale_m, scale_v = encode(m, v, step=1)
    for error in (decode_signed(codes_m, scale_m) - m, decode_unsigned(codes_v, scale_v) - v):
        assert torch.corrcoef(error.view(2, 256))[0, 1].abs() < 0.35


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_block_alone(bad: float) -> None:
    m, v = torch.rand(768), torch.rand(768)
    m[300] = v[300] = bad
    codes_m, codes_v, scale_m, scale_v = encode(m, v, step=1)
    for values in (decode_signed(codes_m, scale_m), decode_unsigned(codes_v, scale_v)):
        assert not values[256:512].isfinite().all()
        assert values[:256].isfinite().all()
        assert values[512:].isfinite().all()


def test_codes_are_the_same_in_any_default_dtype() -> None:
    """Codes do not depend on the default dtype, including those of the largest magnitudes, the last codes."""
    ones, steps = torch.ones(256), range(1, 41)
    expected = [encode(ones, ones, step) for step in steps]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = [encode(ones, ones, step) for step in steps]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
