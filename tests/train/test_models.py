"""Models that a job can name."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import partita
from partita.errors import ConfigError
from partita.train.job import DataSection, ModelSection
from partita.train.models import build_model, decoder_shape
from tests.kit import seeds

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
DATA = DataSection(sequence=8)


def windows(vocab: int = 256) -> torch.Tensor:
    return torch.randint(vocab, (2, 9), generator=seeds.generator())


def pretrained_folder(folder: Path) -> LlamaForCausalLM:
    """Write weights and a tokenizer of four words into ``folder``, and return the model."""
    words = {"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    seeds.start(5)
    settings = {key: value for key, value in TINY_LLAMA.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, bos_token_id=None, eos_token_id=None, **settings))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model", [ModelSection(layers=1, width=32), ModelSection(huggingface=TINY_LLAMA)])
def test_loss_and_logits_are_about_the_same_predictions(model: ModelSection) -> None:
    ready = build_model(model, DATA)
    output = ready.module(**ready.inputs(windows()))
    loss = output if isinstance(output, torch.Tensor) else output.loss
    logits = ready.logits(windows()[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), windows()[:, 1:].reshape(-1))
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("model", [ModelSection(layers=1, width=32), ModelSection(huggingface=TINY_LLAMA)])
def test_bytes_become_tokens_and_text_again(model: ModelSection) -> None:
    ready = build_model(model, DATA)
    assert ready.token == "byte"
    tokens = ready.encode("naïve".encode())
    assert tokens.tolist() == list("naïve".encode())
    assert ready.decode(tokens.tolist()) == "naïve"
    assert ready.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_the_seed_decides_the_weights() -> None:
    for settings in ({"layers": 1, "width": 32}, {"huggingface": TINY_LLAMA}):
        first, same, other = (build_model(ModelSection(seed=seed, **settings), DATA).module for seed in (1, 1, 2))
        pairs = list(zip(first.parameters(), same.parameters(), other.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b, _ in pairs)
        assert not all(torch.equal(a, c) for a, _, c in pairs)


def test_feed_forward_width_is_a_multiple_of_16() -> None:
    shape = decoder_shape(ModelSection(width=100, heads=2, ffn_multiple=2.7))
    assert (shape.ffn_width, shape.kv_heads, shape.head_dim) == (272, 2, 50)


def test_folder_brings_its_weights_and_its_tokenizer(tmp_path: Path) -> None:
    saved = pretrained_folder(tmp_path)
    ready = build_model(ModelSection(huggingface=str(tmp_path)), DATA)
    assert ready.token == "token"
    assert ready.encode(b"the cat sat on").tolist() == [1, 2, 3, 0]
    assert ready.decode([2, 3]) == "cat sat"
    assert all(parameter.is_meta for parameter in ready.module.parameters())
    with partita.initialize(ready.module, {"zero": {"stage": 3}}, weights=ready.weights) as engine:
        engine.close(whole=True)
    for mine, theirs in zip(ready.module.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_weights_that_are_no_safetensors_are_read_by_transformers(tmp_path: Path) -> None:
    saved = pretrained_folder(tmp_path)
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    ready = build_model(ModelSection(huggingface=str(tmp_path)), DATA)
    assert ready.weights is None
    assert ready.module.training
    for mine, theirs in zip(ready.module.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_tokenizer_may_come_from_another_folder(tmp_path: Path) -> None:
    pretrained_folder(tmp_path)
    data = DATA.model_copy(update={"tokenizer": str(tmp_path)})
    ready = build_model(ModelSection(huggingface=str(tmp_path / "config.json")), data)
    assert ready.encode(b"the cat").tolist() == [1, 2]
    with pytest.raises(ConfigError, match="data.tokenizer: no tokenizer in '.*nowhere' .*; correct the path"):
        build_model(
            ModelSection(huggingface=str(tmp_path)), DATA.model_copy(update={"tokenizer": str(tmp_path / "nowhere")})
        )


def test_folder_can_be_read_again_after_saving_its_config(tmp_path: Path) -> None:
    pretrained_folder(tmp_path / "first")
    ready = build_model(ModelSection(huggingface=str(tmp_path / "first")), DATA)
    ready.save_config(tmp_path / "second")
    again = build_model(ModelSection(huggingface=str(tmp_path / "second")), DATA)
    assert again.encode(b"cat").tolist() == [2]
    shapes = [parameter.shape for parameter in again.module.parameters()]
    assert shapes == [parameter.shape for parameter in ready.module.parameters()]


def test_config_file_gives_fresh_weights(tmp_path: Path) -> None:
    saved = build_model(ModelSection(huggingface=TINY_LLAMA, seed=1), DATA).module
    saved.save_pretrained(tmp_path)
    ready = build_model(ModelSection(huggingface=str(tmp_path / "config.json")), DATA)
    pairs = list(zip(ready.module.parameters(), saved.parameters(), strict=True))
    assert all(one.shape == other.shape for one, other in pairs)
    assert not torch.equal(*pairs[0])


def test_bytes_take_a_vocabulary_of_all_of_them(tmp_path: Path) -> None:
    pretrained_folder(tmp_path)
    with pytest.raises(ConfigError, match="vocab_size 4 is less than the 256 bytes, and it has no tokenizer"):
        build_model(ModelSection(huggingface=str(tmp_path / "config.json")), DATA)


@pytest.mark.parametrize(
    ("huggingface", "messages"),
    [
        ("nowhere/at/all", ["no file or folder 'nowhere/at/all'", "hf download"]),
        ({"model_type": "lama"}, ["transformers cannot build it", "lama"]),
        ({**TINY_LLAMA, "vocab_size": 100}, ["vocab_size 100 is less than the 256 bytes"]),
        ({"model_type": "vit"}, ["transformers cannot build it", "name a causal language model"]),
        (
            {**TINY_LLAMA, "max_position_embeddings": 8},
            ["data.sequence: 8 and one token to predict are more than the 8 positions", "at most 7"],
        ),
    ],
)
def test_what_cannot_be_built_is_said(huggingface: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelSection(huggingface=huggingface), DATA)
    for message in messages:
        assert message in str(caught.value)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    """Code that comes with a model is not run, even if the user would answer yes to a prompt."""
    marker = tmp_path / "was_run"
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", "auto_map": auto_map}))
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    with mock.patch("builtins.input", return_value="y") as asked:
        with pytest.raises(ConfigError, match="transformers cannot build it"):
            build_model(ModelSection(huggingface=str(tmp_path)), DataSection())
    assert not marker.exists()
    asked.assert_not_called()
