"""Tiny transformers models. Some have other names in their files than in their modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit.models import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "use_cache": True,
}
IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


def llama(*, tied: bool = False) -> nn.Module:
    return FAMILIES["llama"](**SIZES, tie_word_embeddings=tied)


def tied() -> nn.Module:
    return llama(tied=True)


def mixtral() -> nn.Module:
    """Return a model whose experts are one parameter in memory, and a tensor each in files."""
    return FAMILIES["mixtral"](**SIZES)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**IMAGES, num_labels=3))


def dinov2() -> nn.Module:
    """Return a model with two parameters in memory that are one tensor in files."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    sizes = {**IMAGES, "mlp_ratio": 2, "use_swiglu_ffn": True, "num_labels": 3}
    return Dinov2ForImageClassification(Dinov2Config(**sizes))


CASES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": tied,
    "mixtral": mixtral,
    "vit": vit,
    "dinov2": dinov2,
}


def build(name: str) -> Any:
    """Return a model in evaluation mode, with the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CASES[name]().eval()


def logits(model: Any) -> Tensor:
    """Return the logits of a fixed batch."""
    generator = torch.Generator().manual_seed(0)
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        if model.main_input_name == "pixel_values":
            found: Tensor = model(torch.randn(2, 3, 8, 8, generator=generator).to(dtype)).logits
        else:
            found = model(torch.randint(64, (2, 16), generator=generator)).logits
    return found
