"""Small models of common architectures, in fp32 and without dropout, and batches for them: six query heads, two key
heads, and a vocabulary that is not divisible by three.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita.train.decoder import Decoder, DecoderShape
from tests.kit import seeds
from tests.kit.models import FAMILIES, Family

VOCAB, WIDTH, LENGTH = 128, 48, 11
_SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": VOCAB,
}
_DECODER = {**_SIZES, "intermediate_size": 96, "max_position_embeddings": 64, "use_cache": False}
_GROUPED = {**_DECODER, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

Batch = dict[str, Tensor]


def _tiny(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    return partial(FAMILIES[name], **sizes)


def _causal(name: str, **settings: Any) -> Callable[[], nn.Module]:
    return Family(name, f"{name}ForCausalLM", settings)


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 6, "n_positions": 64, "vocab_size": VOCAB}
_T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 8, "d_ff": 96}
_NO_VIT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_VIT = {**_SIZES, "intermediate_size": 96, "image_size": 16, "patch_size": 4, "num_labels": 7, **_NO_VIT_DROPOUT}
_MAMBA = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCAB, "use_cache": False}
_JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "head_dim": 8,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
}
_FALCON = {**_SIZES, **_NO_DROPOUT, "use_cache": False}

BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": _tiny("llama", **_GROUPED),
    "llama-4": _tiny("llama", **{**_GROUPED, "num_hidden_layers": 4}),
    "qwen3": _tiny("qwen3", **_GROUPED, head_dim=8),
    "qwen3moe": _tiny("qwen3moe", **_GROUPED, **_MOE),
    # The loss depends on the router logits of all blocks and positions.
    "balanced": _tiny("qwen3moe", **_GROUPED, **_MOE, output_router_logits=True, router_aux_loss_coef=0.5),
    "mixtral": _tiny("mixtral", **_GROUPED),
    "gpt2": _tiny("gpt2", **_GPT2),
    "bloom": _causal("Bloom", hidden_size=WIDTH, n_layer=2, n_head=6, vocab_size=VOCAB, **_NO_DROPOUT, use_cache=False),
    # GELU: ReLU amplifies rounding where an input is close to 0.
    "t5": _tiny("t5", **_T5, num_heads=6, num_decoder_layers=2, use_cache=True, feed_forward_proj="gelu"),
    # Two stages of a pipeline are cut inside its decoder.
    "t5-decoder": _tiny("t5", **_T5, num_heads=6, num_layers=1, num_decoder_layers=3, feed_forward_proj="gelu"),
    "vit": Family("ViT", "ViTForImageClassification", _VIT),
    "decoder": lambda: Decoder(DecoderShape(layers=2, width=WIDTH, heads=6, kv_heads=2, ffn_width=96, vocab=VOCAB)),
    "neox": _causal("GPTNeoX", **_DECODER, **_NO_DROPOUT),
    "phi3": _tiny("phi3", **_GROUPED),
    "falcon": _causal("Falcon", **_FALCON, alibi=False, new_decoder_architecture=False, multi_query=False),
    "falcon-multi-query": _causal("Falcon", **_FALCON, alibi=True, new_decoder_architecture=False),
    "opt": _causal(
        "OPT", **_SIZES, ffn_dim=96, max_position_embeddings=64, word_embed_proj_dim=WIDTH, dropout=0.0, use_cache=False
    ),
    "olmo2": _tiny("olmo2", **_GROUPED),
    "gemma2": _tiny("gemma2", **_GROUPED, head_dim=8),
    "bert": _tiny("bert", **_DECODER),
    "mamba": _causal("Mamba", **_MAMBA, state_size=8, time_step_rank=4),
    "jamba": _causal("Jamba", **{**_GROUPED, **_JAMBA}, mamba_d_state=8, mamba_dt_rank=4),
    "apertus": _causal("Apertus", **_GROUPED),  # its activations have learned parameters
    "gemma3n": Family("Gemma3nText", "Gemma3nForCausalLM", {**_GROUPED, **_GEMMA3N}),
}

# Models in which modules read other modules' weights, which are full only in an engine.
READING_WEIGHTS = ("mamba", "jamba")


def build(name: str) -> nn.Module:
    seeds.start()
    return BUILD[name]()


def batch(name: str, step: int, num_samples: int = 2) -> Batch:
    """Return random tokens of a length by step, the first sample padded on the left, and labels; images for ``vit``."""
    generator = seeds.generator(step)
    if name == "vit":
        images = torch.randn(num_samples, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(7, (num_samples,), generator=generator)}
    length = LENGTH + step % 3
    tokens = torch.randint(3, VOCAB, (num_samples, length), generator=generator)
    if name == "decoder":
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if name.startswith("t5"):
        return {"input_ids": tokens, "labels": torch.randint(3, VOCAB, (num_samples, 7), generator=generator)}
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


def loss_of(output: Any) -> Tensor:
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
