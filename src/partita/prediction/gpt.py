"""GPT-2's decoder (Radford et al., 2019), as in the ZeRO papers' figures: 12 x layers x hidden^2 matrix elements."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GptShape:
    """The sizes of a GPT; ``context`` is the number of positions that it learns."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    context: int = 1024


class Attention(nn.Module):
    """Causal self-attention of ``[batch, length, hidden]``, with one matrix for queries, keys and values."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.head_dim = shape.hidden // shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, self.head_dim).transpose(1, 2)
        queries, keys, values = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return merged


class FeedForward(nn.Module):
    """Feed-forward layer with GELU, four times as wide as the model."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normed first and added to the residual stream."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape)
        self.ffn_norm = nn.LayerNorm(shape.hidden)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Gpt(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch, length, vocab]``, or, given targets, to their mean loss in nats.

    The output layer and the embedding share their weight.
    """

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.context, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
