"""The codecs of :mod:`partita.kernels.codecs` in plain torch: the definition of every bit, for any device.

**Levels.** A code is an integer from 0 to 2c (c is 127, 7, 1.5, 1, 0.5 for 8 bits, 4 bits, 2 bits, three levels, signs)
and represents (code - c) * step. A record is the step, in fp32, and the codes. A value x becomes floor(x / step + c +
r). With stochastic rounding, r is one of 2^16 fractions below 1, and the step is the block's largest magnitude / c: the
decoded value is x on average (to 2^-17 of a step), and zero stays zero. With rounding to nearest, r is 1/2 and codes
are clamped to the last level. The step of 2 bits is then 1.25 times the mean magnitude, excluding the zeros at the
block's end (the padding of a parameter's last block); that of signs is twice the mean magnitude (values decode to plus
or minus the mean). With three levels, magnitudes above 0.7 of the mean become nonzero, and the step is their mean.

**top8.** The 8 largest magnitudes of a block, unchanged, in the order of their indices, then their indices.

A block of zeros decodes to zeros. A block with a non-finite value decodes to non-finite values (top8: unchanged
values). Random numbers are hashes of the seed, the index in the block and the block's number, and of nothing else.
"""

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from partita.kernels.chunks import chunks
from partita.kernels.codecs import STEP_BYTES, TOP, Codec
from partita.kernels.quantize import LEAST_SCALE, nearest_bf16
from partita.table.residence import BLOCK

# Per codec: c, number of codes in a byte, base of a code as a digit of the byte, and the step relative to the mean
# magnitude (0.0: relative to the largest).
_LEVELS = {
    "int8": (127.0, 1, 256, 0.0),
    "int4": (7.0, 2, 16, 0.0),
    "two_bits": (1.5, 4, 4, 1.25),
    "ternary": (1.0, 5, 3, 1.4),
    "sign": (0.5, 8, 2, 2.0),
}
_WORD = 0xFFFFFFFF
Words = TypeVar("Words", int, Tensor)  # of 32 bits
_GOLDEN = 0x9E3779B1


def encode(codec: Codec, values: Tensor, codes: Tensor, residual: Tensor | None, seed: int | None, first: int) -> None:
    """Encode as :func:`partita.kernels.codec.encode` does."""
    for at, of_codes in _chunks(codec, values):
        _encode(
            codec,
            values[at],
            codes[of_codes],
            None if residual is None else residual[at],
            seed,
            first + at.start // BLOCK,
        )


def decode(codec: Codec, codes: Tensor, out: Tensor, *, add: bool) -> None:
    """Decode as :func:`partita.kernels.codec.decode` does."""
    for at, of_codes in _chunks(codec, out):
        values = _decoded(codec, codes[of_codes])
        if add:
            out[at].add_(values)
        else:
            out[at].copy_(nearest_bf16(values) if out.dtype == torch.bfloat16 else values)


def _chunks(codec: Codec, values: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the range of each chunk of values, and the range of its codes."""
    for chunk in chunks(values):
        yield chunk, slice(codec.num_bytes(chunk.start), codec.num_bytes(chunk.stop))


def _encode(codec: Codec, values: Tensor, codes: Tensor, residual: Tensor | None, seed: int | None, first: int) -> None:
    total = values.float() if residual is None else values.float() + residual
    blocks, records = total.view(-1, BLOCK), codes.view(-1, codec.record_bytes)
    fractions = None if seed is None else _fractions(len(blocks), seed, first, values.device)
    if codec.name == "top8":
        _encode_top(blocks, records)
    else:
        _encode_levels(codec, blocks, records, fractions)
    if residual is not None:
        residual.copy_(total - _decoded(codec, codes))


def _decoded(codec: Codec, codes: Tensor) -> Tensor:
    records = codes.view(-1, codec.record_bytes)
    if codec.name == "top8":
        values, places = _float(records[:, : 4 * TOP]), records[:, 4 * TOP :].long()
        return values.new_zeros(len(records), BLOCK).scatter_(1, places, values).view(-1)
    center, digits, base, _ = _LEVELS[codec.name]
    remaining, found = records[:, STEP_BYTES:].int(), list[Tensor]()
    for _ in range(digits):
        found.append(remaining % base)
        remaining = remaining // base
    levels = torch.cat(found, 1)[:, :BLOCK].float() - center
    return (levels * _float(records[:, :STEP_BYTES])).view(-1)


def _encode_levels(codec: Codec, blocks: Tensor, records: Tensor, fractions: Tensor | None) -> None:
    center, digits, base, width = _LEVELS[codec.name]
    largest = blocks.abs().amax(1, keepdim=True)  # NaN if the block has one
    regular = largest.isfinite() & (largest > 0)
    cuts = width != 0 and fractions is None
    widths = _sum(blocks.abs() * 2.0**-8) * width if cuts else largest
    if cuts and codec.name == "two_bits":
        places = torch.arange(1, BLOCK + 1, device=blocks.device)
        count = torch.where(blocks != 0, places, 1).amax(1, keepdim=True)
        widths = widths * torch.div(widths.new_full((), float(BLOCK)), count)
    scale = widths.clamp_min(LEAST_SCALE)
    shifted = blocks * torch.div(scale.new_full((), 1.0 if cuts else center), scale) + center
    codes = (shifted + (0.5 if fractions is None else fractions)).clamp(0.0, 2 * center + 0.5)
    codes = torch.where(regular, codes, 0.0).int()
    step = scale if cuts else torch.div(scale, scale.new_full((), center))
    if cuts and codec.name == "ternary":
        chosen = codes != 1
        total = _sum(torch.where(chosen, blocks.abs() * 2.0**-8, 0.0))
        step = torch.div(total, chosen.sum(1, keepdim=True).clamp_min(1).float()) * 256.0
    step = torch.where(regular, step, torch.where(largest == 0, 0.0, torch.nan))
    records[:, :STEP_BYTES] = step.view(torch.uint8)
    columns = torch.nn.functional.pad(codes, (0, -BLOCK % digits)).view(len(blocks), digits, -1).unbind(1)
    packed = columns[-1]
    for column in reversed(columns[:-1]):
        packed = packed * base + column
    records[:, STEP_BYTES:] = packed.to(torch.uint8)


def _encode_top(blocks: Tensor, records: Tensor) -> None:
    bits = blocks.view(torch.int32) & 0x7FFFFFFF  # ordered like the magnitudes, with NaN above all
    order = torch.sort(bits, dim=1, descending=True, stable=True).indices
    places = order[:, :TOP].sort(1).values
    records[:, : 4 * TOP] = blocks.gather(1, places).view(torch.uint8)
    records[:, 4 * TOP :] = places.to(torch.uint8)


def _float(records: Tensor) -> Tensor:
    return records.contiguous().view(torch.float32)


def _sum(blocks: Tensor) -> Tensor:
    """Return the sum of each block in a fixed order: accumulate sixteen lanes, then add halves of them."""
    steps = blocks.view(len(blocks), -1, 16)
    lanes = steps[:, 0]
    for number in range(1, steps.shape[1]):
        lanes = lanes + steps[:, number]
    while (half := lanes.shape[1] // 2) > 0:
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def _hash(words: Words) -> Words:
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def _fractions(num_blocks: int, seed: int, first: int, device: torch.device) -> Tensor:
    """Return random multiples of 2^-16 in [0, 1), ``[num_blocks, BLOCK]``. An integer plus one of them rounds down to
    the integer.
    """
    word = seed & _WORD  # hashed on the host: a tensor of it would be copied to the device, which blocks the caller
    places = _hash((torch.arange(BLOCK, device=device) + _hash((word + 1) & _WORD)) & _WORD)
    numbers = (torch.arange(num_blocks, device=device) + first) & _WORD
    blocks = _hash((numbers + _hash(word ^ _GOLDEN)) & _WORD)
    return ((((places ^ blocks.view(-1, 1)) * _GOLDEN) & _WORD) >> 16).float() * 2.0**-16
