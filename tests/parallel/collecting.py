"""Small transformers models that read the hidden states of single blocks, or also have vision blocks; and batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit import seeds

VOCAB, WIDTH, IMAGE_TOKEN = 128, 48, 100
_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
_CLIP: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 8,
}
_SOUND: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "num_labels": 3,
    "classifier_proj_size": 16,
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "layerdrop"), 0.0
    ),
}


def llava(layer: int | list[int] = -2) -> nn.Module:
    """Return a LLaVA model whose text model reads the image's hidden states at ``layer``."""
    import transformers as t

    vision, text = t.CLIPVisionConfig(**_CLIP), t.LlamaConfig(**_TEXT)
    return t.LlavaForConditionalGeneration(
        t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=layer)
    )


def qwen2vl() -> nn.Module:
    """Return a Qwen2-VL model: vision blocks take ``[patches, width]``, and text positions have three coordinates."""
    import transformers as t

    vision = {"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    text = {**_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    return t.Qwen2VLForConditionalGeneration(
        t.Qwen2VLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    )


def wav2vec2() -> nn.Module:
    """Return a Wav2Vec2 model whose head takes a trained, weighted sum of all hidden states."""
    import transformers as t

    return t.Wav2Vec2ForSequenceClassification(t.Wav2Vec2Config(**_SOUND, use_weighted_layer_sum=True))


BUILD: dict[str, Callable[[], nn.Module]] = {
    "llava": llava,
    "llava-two-layers": partial(llava, [0, -1]),
    "qwen2vl": qwen2vl,
    "wav2vec2": wav2vec2,
}


def batch(name: str, number: int, num_samples: int = 2) -> dict[str, Tensor]:
    generator = seeds.generator(number)
    if name == "wav2vec2":
        return {
            "input_values": torch.randn(num_samples, 400 + 40 * (number % 3), generator=generator),
            "labels": torch.randint(3, (num_samples,), generator=generator),
        }
    tokens = torch.randint(3, IMAGE_TOKEN - 1, (num_samples, 13 + number % 3), generator=generator)
    tokens[:, 2:6] = IMAGE_TOKEN
    labels = tokens.masked_fill(tokens == IMAGE_TOKEN, -100)
    found = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
    if name.startswith("llava"):
        return {**found, "pixel_values": torch.randn(num_samples, 3, 16, 16, generator=generator)}
    return {
        **found,
        "pixel_values": torch.randn(num_samples * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * num_samples),
        "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
    }
