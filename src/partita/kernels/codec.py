"""Encoding of values into codes for communication, and decoding, in one pass. :mod:`partita.kernels.codecs` lists the
codecs.

The C++ kernels of csrc/ process CPU tensors; :mod:`partita.kernels.codec_reference` processes all others, and CPU
tensors without compiled kernels. Both give the same bits, for any number of threads, any instruction set, and any split
of a buffer at block boundaries.
"""

import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.kernels import codec_reference, native
from partita.kernels.codecs import CODECS, Codec, TorchCodec
from partita.kernels.state import GRADIENTS, check
from partita.table.residence import BLOCK

_NUMBERS = {name: number for number, name in enumerate(CODECS)}  # the values of `Codec` in csrc/kernels.hpp


def encode(
    codec: Codec,
    values: Tensor,
    codes: Tensor,
    *,
    seed: int | None = None,
    first_block: int = 0,
    residual: Tensor | None = None,
    threads: int = 1,
    level: str | None = None,
) -> None:
    """Encode ``values`` ``[n]`` (fp32, bf16 or fp16) into ``codes``, uint8 ``[codec.num_bytes(n)]``.

    Args:
        seed: seed of stochastic rounding, with which decoded values are unbiased; None: round to the nearest level.
        first_block: the number of the first block of ``values`` in the buffer that they belong to.
        residual: the residual of error feedback, fp32 ``[n]`` (Seide et al., 2014; Karimireddy et al., 2019). It is
            added to the values, and overwritten with the error of the encoded sum.
        threads: at least 1; without compiled kernels, torch's own threads are used.
        level: the instruction set (see :func:`partita.kernels.native.levels`); by default the widest.

    Raises:
        PartitaError: a tensor has the wrong dtype, length or device; ``values`` are not full blocks; or the codec does
            not support stochastic rounding.
    """
    _check(codec, values, codes, "values", GRADIENTS)
    if residual is not None:
        check("residual", residual, GRADIENTS[:1], values)
    if seed is not None and not codec.unbiased:
        raise PartitaError(f"{codec.name} does not support stochastic rounding: omit seed")
    if isinstance(codec, TorchCodec):
        _encode_in_torch(codec, values, codes, residual)
        return
    kernels = native.kernels_for(values)
    if kernels is None:
        codec_reference.encode(codec, values, codes, residual, seed, first_block)
        return
    kernels.encode(
        native.launch(values.numel(), threads, level),
        _NUMBERS[codec.name],
        native.typed(values),
        native.address(residual),
        native.address(codes),
        (seed is not None, (seed or 0) % 2**32, first_block % 2**32),
    )


def decode(
    codec: Codec, codes: Tensor, out: Tensor, *, add: bool = False, threads: int = 1, level: str | None = None
) -> None:
    """Decode ``codes`` into ``out`` ``[n]`` (fp32, bf16 or fp16), or ``add`` the values to it (fp32).

    The arguments and errors are :func:`encode`'s.
    """
    _check(codec, out, codes, "out", GRADIENTS[:1] if add else GRADIENTS)
    if isinstance(codec, TorchCodec):
        decoded = codec.decode(codes.view(-1, codec.record_bytes)).view(-1)
        out.add_(decoded) if add else out.copy_(decoded)
        return
    kernels = native.kernels_for(out)
    if kernels is None:
        codec_reference.decode(codec, codes, out, add=add)
        return
    kernels.decode(
        native.launch(out.numel(), threads, level),
        _NUMBERS[codec.name],
        native.address(codes),
        native.typed(out),
        add,
    )


def _encode_in_torch(codec: TorchCodec, values: Tensor, codes: Tensor, residual: Tensor | None) -> None:
    total = values.float() if residual is None else residual.add_(values)
    records = codec.encode(total.reshape(-1, BLOCK))
    expected = (total.numel() // BLOCK, codec.record_bytes)
    if records.dtype != torch.uint8 or tuple(records.shape) != expected:
        raise PartitaError(
            f"{type(codec).__name__}.encode returned {records.dtype} of shape {tuple(records.shape)}: expected "
            f"torch.uint8 of shape {expected}"
        )
    codes.view(expected).copy_(records)
    if residual is not None:
        residual.sub_(codec.decode(records).view(-1))


def _check(codec: Codec, values: Tensor, codes: Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check(name, values, dtypes, values)
    try:
        expected = codec.num_bytes(values.numel())
    except ValueError as error:
        raise PartitaError(f"{name}: {error}") from None
    check("codes", codes, (torch.uint8,), values, expected)
