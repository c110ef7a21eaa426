"""Small models of Hugging Face's transformers with random weights, each with a batch that has labels."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks._zoo_plain import Case

VOCAB, B, LENGTH = 99, 4, 16
NO_DROPOUT = dict.fromkeys(
    """
    hidden_dropout_prob attention_probs_dropout_prob attention_dropout hidden_dropout activation_dropout dropout
    resid_pdrop embd_pdrop attn_pdrop classifier_dropout dropout_rate attn_dropout resid_dropout embd_dropout
    feat_proj_dropout final_dropout layerdrop encoder_layerdrop decoder_layerdrop drop_path_rate seq_classif_dropout
    classifier_dropout_prob attention_probs_dropout classifier_proj_size_dropout embed_dropout
    """.split(),
    0.0,
)

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DECODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **GROUPED, "max_position_embeddings": 64}
ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {**DECODER, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "decoder_start_token_id": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
IMAGES = {**ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 3}


def _model(name: str, settings: dict[str, Any]) -> torch.nn.Module:
    """Build a model of the class ``name`` without dropout, with these settings and the usual ones its config has."""
    kind = getattr(transformers, name)
    known = kind.config_class()
    usual = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **NO_DROPOUT}
    chosen = {key: value for key, value in usual.items() if hasattr(known, key)} | settings
    return kind(kind.config_class(**chosen))


def _text(name: str, **settings: Any) -> Case:
    ids = torch.randint(3, VOCAB, (B, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, LENGTH // 2 :] = 0
    return Case(_model(name, settings), (), {"input_ids": ids, "attention_mask": mask, "labels": ids})


def _causal(name: str, **settings: Any) -> Case:
    ids = torch.randint(3, VOCAB, (B, LENGTH))
    return Case(_model(name, settings), (), {"input_ids": ids, "labels": ids})


def _classified(name: str, **settings: Any) -> Case:
    ids = torch.randint(3, VOCAB, (B, LENGTH))
    labels = torch.rand(B) * 1000 if settings.get("num_labels") == 1 else torch.randint(0, 3, (B,))
    return Case(_model(name, {"num_labels": 3, **settings}), (), {"input_ids": ids, "labels": labels})


def _pixels(name: str, **settings: Any) -> Case:
    batch = {"pixel_values": torch.randn(B, 3, 16, 16), "labels": torch.randint(0, 3, (B,))}
    return Case(_model(name, {"num_labels": 3, **settings}), (), batch)


def _image(name: str, **settings: Any) -> Case:
    return _pixels(name, **(IMAGES | settings))


def _speech(name: str, **settings: Any) -> Case:
    asked = {
        **ENCODER, "conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "vocab_size": 20,
        "ctc_loss_reduction": "mean", "feat_extract_norm": "layer", "apply_spec_augment": False, **settings,
    }  # fmt: skip
    return Case(_model(name, asked), (), {"input_values": torch.randn(B, 800), "labels": torch.randint(1, 20, (B, 5))})


def _whisper() -> Case:
    model = _model(
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
    )
    return Case(model, (), {"input_features": torch.randn(B, 8, 40), "labels": torch.randint(3, VOCAB, (B, 8))})


def _clip(name: str, **settings: Any) -> Case:
    kind = getattr(transformers, name)
    text = {
        **ENCODER,
        "vocab_size": VOCAB,
        "max_position_embeddings": LENGTH,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {**ENCODER, "image_size": 16, "patch_size": 4}
    model = kind(kind.config_class(text_config=text, vision_config=vision, projection_dim=16))
    batch = {
        "input_ids": torch.randint(3, VOCAB, (B, LENGTH)),
        "pixel_values": torch.randn(B, 3, 16, 16),
        "return_loss": True,
    }
    return Case(model, (), batch)


def _series() -> Case:
    asked = {
        "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "scaling": "mean",
    }  # fmt: skip
    past = {
        "past_values": torch.rand(B, 10) * 1000,
        "past_time_features": torch.rand(B, 10, 1),
        "past_observed_mask": torch.ones(B, 10),
    }
    future = {"future_values": torch.rand(B, 4) * 1000, "future_time_features": torch.rand(B, 4, 1)}
    return Case(_model("TimeSeriesTransformerForPrediction", asked), (), past | future)


def _patches() -> Case:
    asked = {
        "num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 8,
        "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32, "loss": "mse",
    }  # fmt: skip
    values = {"past_values": torch.rand(B, 32, 2) * 1000, "future_values": torch.rand(B, 8, 2) * 1000}
    return Case(_model("PatchTSTForPrediction", asked), (), values)


TRANSFORMERS: dict[str, Callable[[], Case]] = {
    **{
        name: partial(_causal, f"{name}ForCausalLM", **settings)
        for name, settings in {
            "Llama": DECODER,
            "Mistral": {**DECODER, "sliding_window": 8},
            "Qwen2": DECODER,
            "Qwen3": DECODER,
            "Gemma": DECODER,
            "Gemma2": {**DECODER, "query_pre_attn_scalar": 8, "sliding_window": 8},
            "Phi": DECODER,
            "Phi3": {**DECODER, "num_key_value_heads": 4},
            "StableLm": DECODER,
            "Olmo": DECODER,
            "Olmo2": DECODER,
            "Cohere": DECODER,
            "Granite": DECODER,
            "Starcoder2": DECODER,
            "GPTNeoX": {**ENCODER, "rotary_pct": 0.5, "max_position_embeddings": 64},
            "GPTJ": {**GPT, "rotary_dim": 4},
            "CodeGen": {**GPT, "rotary_dim": 4},
            "OPT": {**ENCODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
            "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
            "Falcon": {**ENCODER, "num_kv_heads": 2, "alibi": False},
            "Mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
            "Mixtral": EXPERTS,
            "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
            "Qwen3Moe": EXPERTS,
            "Olmoe": EXPERTS,
            "Mamba": {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 4},
            "Rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
        }.items()
    },
    "GPT2": partial(_causal, "GPT2LMHeadModel", **GPT),
    "Bert": partial(_text, "BertForMaskedLM", **ENCODER),
    "BertRegression": partial(
        _classified, "BertForSequenceClassification", num_labels=1, problem_type="regression", **ENCODER
    ),
    "Roberta": partial(_text, "RobertaForMaskedLM", **ENCODER, pad_token_id=1, max_position_embeddings=64),
    "Albert": partial(_text, "AlbertForMaskedLM", **ENCODER, embedding_size=16),
    "DistilBert": partial(
        _classified, "DistilBertForSequenceClassification", dim=32, hidden_dim=64, n_layers=2, n_heads=4
    ),
    "Electra": partial(_classified, "ElectraForSequenceClassification", **ENCODER, embedding_size=16),
    "DebertaV2": partial(
        _classified,
        "DebertaV2ForSequenceClassification",
        **ENCODER,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "MPNet": partial(_text, "MPNetForMaskedLM", **ENCODER, pad_token_id=1, max_position_embeddings=64),
    "ModernBert": partial(_text, "ModernBertForMaskedLM", **ENCODER, local_attention=8, global_attn_every_n_layers=2),
    "T5": partial(
        _text,
        "T5ForConditionalGeneration",
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "T5Gated": partial(
        _text,
        "T5ForConditionalGeneration",
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    ),
    "Bart": partial(_text, "BartForConditionalGeneration", **SEQ2SEQ),
    "Pegasus": partial(_text, "PegasusForConditionalGeneration", **SEQ2SEQ),
    "M2M100": partial(_text, "M2M100ForConditionalGeneration", **SEQ2SEQ),
    "Whisper": _whisper,
    "ViT": partial(_image, "ViTForImageClassification"),
    "DeiT": partial(_image, "DeiTForImageClassification"),
    "Beit": partial(_image, "BeitForImageClassification", use_relative_position_bias=True),
    "Swin": partial(
        _pixels,
        "SwinForImageClassification",
        image_size=16,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=2,
        patch_size=2,
    ),
    "ConvNext": partial(
        _image, "ConvNextForImageClassification", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2
    ),
    "ResNet": partial(
        _image,
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    "Dinov2": partial(_image, "Dinov2ForImageClassification"),
    "Clip": partial(_clip, "CLIPModel"),
    "Siglip": partial(_clip, "SiglipModel"),
    "Wav2Vec2": partial(_speech, "Wav2Vec2ForCTC"),
    "Hubert": partial(_speech, "HubertForCTC"),
    "TimeSeriesTransformer": _series,
    "PatchTST": _patches,
}
