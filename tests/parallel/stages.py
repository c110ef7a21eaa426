"""Small models with several blocks, in fp32 and without dropout, and batches for them whose lengths differ."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita.train.decoder import Decoder, DecoderShape
from tests.kit import seeds
from tests.kit.models import FAMILIES, Family
from tests.parallel import collecting

VOCAB, WIDTH = 128, 48
Batch = dict[str, Tensor]


class Skipping(nn.Module):
    """Model whose blocks also read the embedding, and which itself reads a parameter before each block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

        def forward(self, x: Tensor, first: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x)))) + 0.1 * first

    def __init__(self, *, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.scales = nn.Parameter(torch.ones(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        first = x = self.embedding(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x * self.scales[number], x if self.skips else first)
        if self.skips:
            x = x + first
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Images(nn.Module):
    """Pre-activation ResNet whose four blocks change their inputs in place."""

    class Block(nn.Module):
        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(num_in), nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
            self.shortcut = nn.Conv2d(num_in, num_out, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.mul_(0.5)
            return self.conv(F.relu(self.norm(x), inplace=True)) + self.shortcut(x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.layers = nn.Sequential(self.Block(8, 8), self.Block(8, 16), self.Block(16, 16), self.Block(16, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.stem(pixels)).mean((2, 3))), labels)


_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "use_cache": True}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_GPT2 = {"n_embd": WIDTH, "n_layer": 4, "n_head": 6, "n_positions": 64, "use_cache": True, "vocab_size": VOCAB}
_T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 96, "use_cache": True}
_VIT = {**_SIZES, "image_size": 16, "patch_size": 4, "num_labels": 7}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": partial(FAMILIES["llama"], **_GROUPED),
    "qwen3": partial(FAMILIES["qwen3"], **_GROUPED, head_dim=8),
    "qwen3moe": partial(FAMILIES["qwen3moe"], **_GROUPED, **_MOE),
    # The loss depends on the router logits of all blocks.
    "balanced": partial(FAMILIES["qwen3moe"], **_GROUPED, **_MOE, output_router_logits=True, router_aux_loss_coef=0.5),
    "gpt2": partial(FAMILIES["gpt2"], **_GPT2),
    "bloom": Family(
        "Bloom", "BloomForCausalLM", {"hidden_size": WIDTH, "n_layer": 4, "n_head": 6, "vocab_size": VOCAB}
    ),
    "opt": Family(
        "OPT",
        "OPTForCausalLM",
        {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": WIDTH, "dropout": 0.0, "tie_word_embeddings": False},
    ),
    "mamba": Family(
        "Mamba",
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 24, "state_size": 4, "num_hidden_layers": 4},
    ),
    "t5": partial(FAMILIES["t5"], **_T5, num_heads=6),
    "vit": Family("ViT", "ViTForImageClassification", {**_VIT, **_NO_DROPOUT}),
    "bert": partial(FAMILIES["bert"], **_SIZES),
    "decoder": lambda: Decoder(DecoderShape(layers=4, width=WIDTH, heads=6, kv_heads=2, ffn_width=96, vocab=VOCAB)),
    "skipping": Skipping,
    "resnet": Images,
    "sequential": lambda: nn.Sequential(
        nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 7)
    ),
    **collecting.BUILD,
}
TIED = ("gpt2", "bloom", "mamba", "t5", "bert", "skipping")


def build(name: str) -> nn.Module:
    seeds.start()
    return BUILD[name]().train()


def batch(name: str, number: int, num_samples: int = 2) -> Any:
    """Return random tokens with labels, the first sample padded on the left; images for models that take them."""
    if name in collecting.BUILD:
        return collecting.batch(name, number, num_samples)
    generator = seeds.generator(number)
    if name == "sequential":
        return torch.randn(num_samples, WIDTH, generator=generator)
    if name in ("vit", "resnet"):
        images = torch.randn(num_samples, 3, 16, 16, generator=generator)
        key = "pixel_values" if name == "vit" else "pixels"
        return {key: images, "labels": torch.randint(5, (num_samples,), generator=generator)}
    tokens = torch.randint(3, VOCAB, (num_samples, 9 + number % 4), generator=generator)
    if name == "decoder":
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if name == "skipping":
        return {"input_ids": tokens, "labels": tokens}
    if name == "t5":
        return {"input_ids": tokens, "labels": torch.randint(3, VOCAB, (num_samples, 7), generator=generator)}
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


def loss_of(output: Any, batch: Any = None) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss if loss.ndim == 0 else loss.square().mean()
