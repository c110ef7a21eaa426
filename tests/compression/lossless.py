"""A lossless codec in place of a lossy one: its codes are the values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from partita.kernels import codec as kernels
from partita.kernels.codecs import CODECS, Codec
from partita.table.residence import BLOCK


@contextmanager
def lossless(name: str) -> Iterator[None]:
    """Make the codec ``name`` lossless, so that residuals are zero. No other codec may be used inside."""

    def encode(codec: Codec, values: Tensor, codes: Tensor, *, residual: Tensor | None = None, **how: Any) -> None:
        codes.copy_((values.float() + (0 if residual is None else residual)).contiguous().view(torch.uint8))
        if residual is not None:
            residual.zero_()

    def decode(codec: Codec, codes: Tensor, out: Tensor, *, add: bool = False, **how: Any) -> None:
        values = codes.view(torch.float32)
        out.add_(values) if add else out.copy_(values)

    with (
        mock.patch.dict(CODECS, {name: Codec(name, BLOCK * 4)}),
        mock.patch.object(kernels, "encode", encode),
        mock.patch.object(kernels, "decode", decode),
    ):
        yield
