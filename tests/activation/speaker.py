"""A small language model, with tokens and targets."""

import torch
from torch import Tensor, nn

from tests.kit import seeds
from tests.kit.models import WIDTH, Stack

VOCAB = 50


class Speaker(nn.Module):
    """Language model from tokens [batch, length] to logits [batch, length, VOCAB]."""

    def __init__(self, *, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.body = Stack(2)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


def speaker(*, tied: bool = False, bias: bool = True) -> Speaker:
    """Return a model with weights from this run's seed."""
    seeds.start()
    return Speaker(tied=tied, bias=bias)


def tokens(number: int = 0, *shape: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, [3, 11] each (or of the given shape); some of the targets are ignored."""
    generator = seeds.generator(number)
    shape = shape or (3, 11)
    targets = torch.randint(VOCAB, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.2] = -100
    return torch.randint(VOCAB, shape, generator=generator), targets
