"""Codecs: the same bits from every implementation, unbiased or with error feedback, and never silently wrong."""

import itertools

import pytest
import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.kernels import native
from partita.kernels.codec import decode, encode
from partita.kernels.codecs import CODECS, Codec
from partita.table.residence import BLOCK

CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
UNBIASED = [codec for codec in CODECS.values() if codec.unbiased]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM = 21 * BLOCK
# The largest error of rounding to nearest, relative to the largest magnitude of a block.
NEAREST = {"int8": 0.5 / 127, "int4": 0.5 / 7}


def coded(codec: Codec, values: Tensor, **how: object) -> Tensor:
    codes = torch.full((codec.num_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    encode(codec, values, codes, **how)  # type: ignore[arg-type]
    return codes


def decoded(codec: Codec, codes: Tensor, dtype: torch.dtype = torch.float32, **how: object) -> Tensor:
    out = torch.empty(codes.numel() // codec.record_bytes * BLOCK, dtype=dtype)
    decode(codec, codes, out, **how)  # type: ignore[arg-type]
    return out


def values_of(dtype: torch.dtype, num: int = NUM) -> Tensor:
    """Return random blocks of several magnitudes, and edge cases: zeros, infinity, NaN, ties, tiny and huge values."""
    values = torch.randn(num) * torch.randn(num // BLOCK).exp().repeat_interleave(BLOCK)
    blocks = values.view(-1, BLOCK)
    blocks[1] = 0.0
    blocks[2, 7] = torch.inf
    blocks[3, 9] = torch.nan
    blocks[4, 40:] = 0.0
    blocks[5] *= 1e-38
    blocks[6] = torch.randint(-2, 3, (BLOCK,)).float()  # ties
    blocks[7] = 3.0
    blocks[8] *= 1e37
    blocks[9] = -blocks[9].abs()
    return values.to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, with the same bits for all NaNs, whose sign has no meaning."""
    return tensor.where(~tensor.isnan(), torch.nan).view(torch.uint8)


@pytest.mark.usefixtures("compiled")
@CODEC
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_level_and_plain_torch_give_the_same_bits(
    codec: Codec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, residual = values_of(dtype), torch.randn(NUM)
    seeds = (None, 7) if codec.unbiased else (None,)
    for seed, with_held in itertools.product(seeds, (False, True)):
        results = list[list[Tensor]]()
        for level in (*native.levels(), None):
            with monkeypatch.context() as patch:
                if level is None:
                    patch.setattr(native, "module", lambda: None)
                rest = residual.clone() if with_held else None
                codes = coded(codec, values, seed=seed, first_block=5, residual=rest, level=level)
                added = torch.ones(NUM)
                decode(codec, codes, added, add=True, level=level)
                outputs = [decoded(codec, codes, out, level=level) for out in DTYPES]
                results.append([codes, *map(bits, outputs), bits(added), bits(residual if rest is None else rest)])
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other))


@CODEC
@pytest.mark.parametrize("kernels", ["compiled", "uncompiled"])
def test_bits_do_not_depend_on_threads_or_cuts(codec: Codec, kernels: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(kernels)
    values, seed = torch.randn(NUM), 3 if codec.unbiased else None
    whole = coded(codec, values, seed=seed)
    assert torch.equal(whole, coded(codec, values, seed=seed, threads=3))
    cut = 5 * BLOCK
    parts = [coded(codec, values[:cut], seed=seed), coded(codec, values[cut:], seed=seed, first_block=5)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(decoded(codec, whole), decoded(codec, whole, threads=3))


@pytest.mark.parametrize("codec", UNBIASED, ids=lambda codec: codec.name)
def test_rounding_at_random_is_right_on_average(codec: Codec) -> None:
    values, num = torch.randn(4 * BLOCK), 4000
    values[:50] = 0.0
    largest = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    total = torch.zeros(values.numel(), dtype=torch.float64)
    for seed in range(num):
        total += decoded(codec, coded(codec, values, seed=seed))
    last = {"int8": 127, "int4": 7, "two_bits": 1.5, "ternary": 1, "sign": 0.5}[codec.name]
    place = (values / largest + 1.0).double() * last
    up = place - place.floor()
    sigma = largest / last * (up * (1 - up) / num).sqrt()
    # Six standard deviations, plus the effect of a few samples and the granularity of the fractions.
    assert ((total / num - values).abs() <= 6 * sigma + largest / last * (2.0 / num + 2.0**-14)).all()
    if codec.name in NEAREST or codec.name == "ternary":
        assert (total[:50] == 0).all()  # zeros have no noise


def test_errors_of_other_places_blocks_and_seeds_are_independent() -> None:
    codec, num = CODECS["int8"], 2000
    values = torch.randn(BLOCK).repeat(2)
    values[BLOCK:] = values[:BLOCK]  # so that equal random numbers would show
    errors = torch.stack([decoded(codec, coded(codec, values, seed=seed)) - values for seed in range(num)])
    size = errors.square().mean(0).sqrt()
    rounded = size > 0.2 * values.abs().max() / 127  # values that lie on a level have no error
    normal = (errors / size)[:, rounded]
    matrix = normal.T @ normal / num
    matrix.fill_diagonal_(0.0)
    assert matrix.abs().max() < 8 / num**0.5
    assert (normal[1:] * normal[:-1]).mean(0).abs().max() < 8 / num**0.5


@pytest.mark.parametrize("name", NEAREST)
def test_rounding_to_nearest_is_off_by_half_a_step(name: str) -> None:
    values = torch.randn(NUM)
    largest = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    error = (decoded(CODECS[name], coded(CODECS[name], values)) - values).abs()
    assert (error <= largest * NEAREST[name] * (1 + 1e-5)).all()


@pytest.mark.parametrize("num", [1, 3, 200, BLOCK])
def test_the_step_of_two_bits_does_not_depend_on_what_fills_the_record(num: int) -> None:
    codec, values = CODECS["two_bits"], torch.zeros(BLOCK)
    values[:num] = torch.randn(num).sign()
    found = decoded(codec, coded(codec, values))
    assert torch.equal(found[:num], values[:num] * 0.625)  # half a step of 1.25 mean magnitudes


@CODEC
def test_less_is_lost_than_was_there(codec: Codec) -> None:
    """Rounded to nearest, every codec is a contraction on ordinary values, so that error feedback stays bounded."""
    values = torch.randn(NUM)
    lost = (decoded(codec, coded(codec, values)) - values).square().sum() / values.square().sum()
    most = {"int8": 1e-4, "int4": 0.02, "two_bits": 0.15, "ternary": 0.25, "sign": 0.4, "top8": 0.9}
    assert lost < most[codec.name]


@CODEC
def test_top8_and_levels_mean_what_they_say(codec: Codec) -> None:
    values = torch.randn(NUM)
    out, blocks = decoded(codec, coded(codec, values)).view(-1, BLOCK), values.view(-1, BLOCK)
    if codec.name == "top8":
        chosen = blocks.abs().topk(8, 1).indices
        assert torch.equal(out, torch.zeros_like(blocks).scatter_(1, chosen, blocks.gather(1, chosen)))
    else:
        most = {"int8": 255, "int4": 15, "two_bits": 4, "ternary": 3, "sign": 2}[codec.name]
        assert max(len(block.unique()) for block in out) <= most
        assert ((out == 0) | (out.sign() == blocks.sign())).all()


@CODEC
@pytest.mark.parametrize("kernels", ["compiled", "uncompiled"])
def test_what_was_sent_and_what_is_held_is_what_was_given(
    codec: Codec, kernels: str, request: pytest.FixtureRequest
) -> None:
    """With error feedback, decoded values and the final residual add up to all given values."""
    request.getfixturevalue(kernels)
    residual = torch.zeros(NUM)
    given, sent = torch.zeros(NUM, dtype=torch.float64), torch.zeros(NUM, dtype=torch.float64)
    for number in range(30):
        values = torch.randn(NUM)
        seed = number if codec.unbiased and number % 2 else None
        codes = coded(codec, values, residual=residual, seed=seed)
        given += values
        sent += decoded(codec, codes)
    scale = given.abs().max() + residual.abs().max()
    assert (sent + residual - given).abs().max() <= 30 * 2.0**-22 * scale
    assert residual.abs().max() < 100  # bounded: residuals are sent eventually


@CODEC
def test_zeros_stay_zeros_and_what_is_not_finite_is_told(codec: Codec) -> None:
    values = torch.randn(3 * BLOCK)
    values[:BLOCK], values[BLOCK], values[BLOCK + 1] = 0.0, torch.inf, torch.nan
    for seed in (None, 1) if codec.unbiased else (None,):
        for dtype in DTYPES:
            out = decoded(codec, coded(codec, values, seed=seed), dtype).view(3, BLOCK)
            assert (out[0] == 0).all()
            assert not out[1].isfinite().all()
            assert out[2].isfinite().all()


@pytest.mark.parametrize("name", [*NEAREST, "top8"])
def test_nearest_of_what_was_decoded_loses_next_to_nothing(name: str) -> None:
    first = decoded(CODECS[name], coded(CODECS[name], torch.randn(NUM)))
    torch.testing.assert_close(decoded(CODECS[name], coded(CODECS[name], first)), first, rtol=1e-6, atol=0)


def test_errors() -> None:
    codec = CODECS["int8"]
    values, codes = torch.zeros(2 * BLOCK), torch.zeros(codec.num_bytes(2 * BLOCK), dtype=torch.uint8)
    with pytest.raises(PartitaError, match=r"values: int8 encodes full blocks of 256 values; got 300"):
        encode(codec, torch.zeros(300), codes)
    with pytest.raises(PartitaError, match=r"codes must have 520 elements, got 519"):
        encode(codec, values, codes[:-1])
    with pytest.raises(PartitaError, match=r"codes must be uint8, got float32"):
        decode(codec, torch.zeros(520), values)
    with pytest.raises(PartitaError, match=r"values must be float32 or bfloat16 or float16, got float64"):
        encode(codec, values.double(), codes)
    with pytest.raises(PartitaError, match=r"residual must be float32, got bfloat16"):
        encode(codec, values, codes, residual=values.bfloat16())
    with pytest.raises(PartitaError, match=r"out must be float32, got bfloat16"):
        decode(codec, codes, values.bfloat16(), add=True)
    top8 = CODECS["top8"]
    with pytest.raises(PartitaError, match=r"top8 does not support stochastic rounding"):
        encode(top8, values, torch.zeros(top8.num_bytes(2 * BLOCK), dtype=torch.uint8), seed=1)
