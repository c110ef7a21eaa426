"""Tests of the mapping between encodings and torch dtypes."""

import pytest
import torch

from partita.layout.dtypes import dtype_of, encoding_of
from partita.table.residence import BF16, ENCODINGS, FP16, FP32

DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


@pytest.mark.parametrize(("dtype", "encoding"), [(torch.float32, FP32), (torch.bfloat16, BF16), (torch.float16, FP16)])
def test_those_of_the_table(dtype: torch.dtype, encoding: object) -> None:
    assert encoding_of(dtype) is encoding


def test_there_and_back() -> None:
    assert len(set(DTYPES)) > 20
    for dtype in DTYPES:
        encoding = encoding_of(dtype)
        assert dtype_of(encoding) is dtype
        assert encoding.itemsize == dtype.itemsize
    assert {dtype_of(encoding) for encoding in ENCODINGS.values()} == {torch.float32, torch.bfloat16, torch.float16}


def test_different_dtypes_have_different_encodings() -> None:
    assert len({encoding_of(dtype) for dtype in DTYPES}) == len(set(DTYPES))
