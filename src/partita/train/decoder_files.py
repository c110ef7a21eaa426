"""Files of the decoder for ``from_pretrained``: weights, configuration and a tokenizer of bytes.

The decoder computes what transformers' Phi-3 computes, which also has one matrix for queries, keys and values, and one
for gate and value. Only names differ.
"""

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from partita.errors import PartitaError
from partita.huggingface.export import WeightsWriter
from partita.huggingface.weights import Weights
from partita.train.decoder import ROTARY_BASE, DecoderShape

_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attn.qkv_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.up": "mlp.gate_up_proj",
    "ffn.down": "mlp.down_proj",
}
_OWN_NAMES = {file_name: name for name, file_name in _NAMES.items()}
# Positions that the configuration declares. They are relative, so more are computed as well.
_POSITIONS = 4096


def file_name(name: str) -> str:
    """Return the name in files of a parameter of the decoder."""
    block, path = _parts(name, "blocks")
    return f"{f'model.layers.{block}.' if block else ''}{_NAMES[path]}.weight"


def own_name(name: str) -> str:
    """Return the name in the decoder of a tensor in files."""
    block, path = _parts(name, "model.layers")
    return f"{f'blocks.{block}.' if block else ''}{_OWN_NAMES[path]}.weight"


def _parts(name: str, blocks: str) -> tuple[str | None, str]:
    """Return the number of the block, if the parameter is in one, and the module's path below it."""
    match = re.fullmatch(rf"(?:{re.escape(blocks)}\.(\d+)\.)?(.+)\.weight", name)
    assert match is not None, name
    return match[1], match[2]


def write_decoder_files(folder: Path, shape: DecoderShape) -> None:
    """Rename the exported weights in a folder, and write their configuration and tokenizer.

    Raises:
        PartitaError: the folder cannot be written.
    """
    weights = Weights(folder)
    with WeightsWriter(folder) as writer:
        for name in list(weights.names):
            writer.add(file_name(name), weights.read(name))
        dtype = str(weights.read(next(iter(weights.names))).dtype).removeprefix("torch.")
        writer.finish()
    if writer.problem is not None:
        raise PartitaError(writer.problem)
    contents = {
        "config.json": _config(shape, dtype),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    }
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_decoder_files(folder: Path, module: nn.Module, *, tied: bool) -> None:
    """Load the weights that :func:`write_decoder_files` wrote into a decoder.

    Raises:
        PartitaError: there are none, or they are of another decoder.
    """
    weights = Weights(folder)
    try:
        values = {own_name(name): weights.read(name) for name in weights.names}
        if tied:
            values["head.weight"] = values["embedding.weight"]
        module.load_state_dict(values)
    except (RuntimeError, KeyError, AssertionError) as error:
        raise PartitaError(
            f"weights '{folder}' are not those of the job's decoder; name the folder of a run with the same model "
            "section"
        ) from error


def _config(shape: DecoderShape, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "dtype": dtype,
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.ffn_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": ROTARY_BASE,
        "max_position_embeddings": _POSITIONS,
        "original_max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": shape.tied,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _tokenizer() -> dict[str, Any]:
    """Return a tokenizer of bytes, in which each token is its byte."""
    by_byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "added_tokens": [],
        "pre_tokenizer": by_byte,
        "decoder": by_byte,
        "model": {"type": "BPE", "vocab": {_character(byte): byte for byte in range(256)}, "merges": []},
    }


def _character(byte: int) -> str:
    """Return the character by which the pre-tokenizer ByteLevel writes a byte.

    Bytes that are no visible characters are counted up from character 256.
    """
    return chr(byte) if _is_visible(byte) else chr(256 + sum(not _is_visible(other) for other in range(byte)))


def _is_visible(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255
