"""Encodings as torch dtypes."""

import torch

from partita.table.residence import ENCODINGS, Encoding

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "split": torch.int16}


def encoding_of(dtype: torch.dtype) -> Encoding:
    """The encoding that stores values as ``dtype``."""
    for encoding in ENCODINGS.values():
        if _DTYPES[encoding.name] == dtype:
            return encoding
    return Encoding(str(dtype).removeprefix("torch."), dtype.itemsize)


def dtype_of(encoding: Encoding) -> torch.dtype:
    """The torch dtype of an encoding's values."""
    dtype = _DTYPES.get(encoding.name) or getattr(torch, encoding.name)
    assert isinstance(dtype, torch.dtype)
    return dtype
