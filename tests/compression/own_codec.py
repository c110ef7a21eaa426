"""A user-defined lossy codec in plain torch, which encodes every value as bf16."""

import torch
from torch import Tensor

from partita.kernels.codecs import TorchCodec
from partita.table.residence import BLOCK


class Halves(TorchCodec):
    def __init__(self) -> None:
        super().__init__("halves", record_bytes=2 * BLOCK, unbiased=False)

    def encode(self, blocks: Tensor) -> Tensor:
        return blocks.bfloat16().view(torch.uint8)

    def decode(self, records: Tensor) -> Tensor:
        return records.view(torch.bfloat16).float()


class Wrong(Halves):
    def encode(self, blocks: Tensor) -> Tensor:
        return blocks.bfloat16()


NOT_A_CODEC = dict
