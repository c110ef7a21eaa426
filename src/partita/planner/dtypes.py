"""Encodings as torch dtypes."""

import torch

from partita.plan.residence import ENCODINGS, Encoding

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_HELD_AS = {"split": torch.int16}


def encoding_of(dtype: torch.dtype) -> Encoding:
    """The encoding that stores values as ``dtype``."""
    name = _NAMES.get(dtype)
    return ENCODINGS[name] if name else Encoding(str(dtype).removeprefix("torch."), dtype.itemsize)


def dtype_of(encoding: Encoding) -> torch.dtype:
    """The torch dtype of an encoding's values."""
    for dtype, name in _NAMES.items():
        if name == encoding.name:
            return dtype
    dtype = _HELD_AS.get(encoding.name) or getattr(torch, encoding.name)
    assert isinstance(dtype, torch.dtype)
    return dtype
