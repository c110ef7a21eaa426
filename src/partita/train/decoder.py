"""A compact decoder-only transformer in plain PyTorch: RMSNorm, rotary positions, SwiGLU, grouped queries.

It does not depend on partita. Every module that directly holds parameters has ``reset_parameters``, which draws from
torch's global generator, so the model can be built on the ``meta`` device and initialized later.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder. ``kv_heads`` key and value heads are each shared by ``heads / kv_heads`` query heads."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocab: int = 256
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def init_std(self) -> float:
        """Standard deviation of the initial weights: SmallInit (Nguyen & Salazar, 2019, section 2.2)."""
        return math.sqrt(2 / (5 * self.width))

    @property
    def residual_std(self) -> float:
        """Standard deviation for layers that write to the residual stream (Radford et al., 2019, section 2.3)."""
        return self.init_std / math.sqrt(2 * self.layers)


class Projection(nn.Linear):
    """A linear layer without bias, drawn from a normal distribution of the given standard deviation."""

    def __init__(self, num_in: int, num_out: int, std: float) -> None:
        self.std = std
        super().__init__(num_in, num_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TokenEmbedding(nn.Embedding):
    """An embedding drawn from a normal distribution of the given standard deviation."""

    def __init__(self, vocab: int, width: int, std: float) -> None:
        self.std = std
        super().__init__(vocab, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al., 2023) and rotary positions (Su et al., 2021)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.qkv = Projection(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.init_std)
        self.out = Projection(shape.heads * shape.head_dim, shape.width, shape.residual_std)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        turned, values = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        queries, keys = rotate(turned, table).split([self.heads, self.kv_heads], dim=1)
        grouped = self.kv_heads < self.heads
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=grouped)
        merged: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return merged


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020), with the gate and the value in one matrix."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.up = Projection(shape.width, 2 * shape.ffn_width, shape.init_std)
        self.down = Projection(shape.ffn_width, shape.width, shape.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * value)
        return out


class Block(nn.Module):
    """Attention and feed-forward, each normed first (Zhang & Sennrich, 2019) and added to the residual stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """A decoder from tokens [batch, length] to logits [batch, length, vocab], or, given targets, to their mean loss.

    Targets are [batch, length]; the loss is in nats. Any length works: positions are relative.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = TokenEmbedding(shape.vocab, shape.width, shape.init_std)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        self.head = Projection(shape.width, shape.vocab, shape.init_std)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        table = rotary_table(tokens.shape[1], self.shape.head_dim, tokens.device)
        for block in self.blocks:
            x = block(x, table)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotary_table(length: int, head_dim: int, device: torch.device) -> Tensor:
    """Return cosines and sines of each position's angles: [2, length, head_dim / 2], fp32."""
    pair = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32)
    position = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(position, ROTARY_BASE ** (-pair / head_dim))
    return torch.stack((angles.cos(), angles.sin()))


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of [batch, heads, length, head_dim] by the angles of ``table``."""
    cos, sin = table.to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
