"""The decoder, batches and optimizer that all modes share."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from partita.train.decoder import Decoder, DecoderShape

OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Work:
    """Sizes of the decoder, of a batch over all ranks, and of the run; the first ``warmup`` steps are not measured."""

    layers: int
    width: int
    heads: int
    ffn_width: int
    batch: int = 8
    sequence: int = 64
    steps: int = 12
    warmup: int = 3
    vocab: int = 256

    def build(self, device: str = "cpu") -> Decoder:
        """Build the decoder, with the same weights on every rank (on ``meta``: without values)."""
        torch.manual_seed(0)
        shape = DecoderShape(self.layers, self.width, self.heads, self.heads, self.ffn_width, self.vocab)
        with torch.device(device):
            return Decoder(shape)

    def part_of_batch(self, step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """Return a rank's tokens and targets, ``[batch / num_ranks, sequence]`` each.

        Small tokens are more frequent than large ones, so that there is something to learn.
        """
        uniform = torch.rand(self.batch, self.sequence + 1, generator=Generator().manual_seed(step))
        rows = uniform.square().mul(self.vocab).long().chunk(num_ranks)[rank]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
