"""Packed documents of transformers models: separated in the same way under every configuration."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    PersimmonConfig,
    PersimmonForCausalLM,
)

import partita
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.ranks import on_ranks

MODELS = {
    "llama": partial(
        FAMILIES["llama"], vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, use_cache=True
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)),
    # Their attention gets no position_ids.
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(
        GPTBigCodeConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    ),
    "persimmon": lambda: PersimmonForCausalLM(
        PersimmonConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    ),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "units": {"activations": {"checkpoint": "units"}},
    "selective": {"activations": {"checkpoint": "selective"}},
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"sequence": 2}},
}
ATTENTION: dict[str, dict[str, Any]] = {
    "packed": {"attention": {"packed": True}},
    "sliding": {"attention": {"pattern": "sliding", "block": 4, "window": 10}},
}
CONFIGS_OF_ATTENTION = {
    f"{name}, {attention}": CONFIGS[name] | ATTENTION[attention]
    for name in ("plain", "sequence")
    for attention in ATTENTION
}


def losses(name: str, config: str, **given: Any) -> list[float]:
    """Return the losses on the second document after two different first documents."""
    seeds.start()
    found = list[float]()
    model = MODELS[name]().train()
    for dropout in (module for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0
    with partita.initialize(model, (CONFIGS | CONFIGS_OF_ATTENTION)[config]) as engine:
        tokens = torch.randint(64, (1, 24), generator=seeds.generator(1))
        labels = tokens.masked_fill(torch.arange(24) < 16, -100)
        positions = torch.arange(12).repeat(2)[None]
        for first in (1, 2):
            tokens[0, 3] = first
            found.append(engine(input_ids=tokens, labels=labels, position_ids=positions, **given).loss.item())
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_documents_are_separated_on_every_mesh(name: str) -> None:
    expected = None
    for config in CONFIGS:
        for found in on_ranks(2, losses, name, config):
            expected = expected or found
            assert found[0] == pytest.approx(found[1], abs=1e-6), config
            assert found == pytest.approx(expected, abs=1e-5), config


def test_documents_that_are_not_separated_are_told_once() -> None:
    for given, said in (
        ({"attention_mask": torch.ones(1, 24, dtype=torch.long)}, "with an attention_mask"),
        ({"use_cache": True}, "with a cache"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert len(set(losses("llama", "plain", **given))) == 2
        assert len([each for each in caught if said in str(each.message)]) == 1


@pytest.mark.parametrize("name", ["llama", "gpt_bigcode", "persimmon"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_block_sparse_attention_separates_documents(name: str, attention: str) -> None:
    expected = losses(name, "plain") if attention == "packed" else losses(name, f"plain, {attention}")
    found = [losses(name, f"plain, {attention}"), *on_ranks(2, losses, name, f"sequence, {attention}")]
    for each in found:
        assert each[0] == pytest.approx(each[1], abs=1e-6)
        assert each == pytest.approx(expected, abs=1e-5)


def test_block_sparse_attention_tells_of_documents_that_it_cannot_separate() -> None:
    seen = torch.ones(1, 24, dtype=torch.long)
    assert len(set(losses("llama", "plain, packed", attention_mask=seen))) == 1
    with pytest.warns(UserWarning, match="with an attention_mask"):
        assert len(set(losses("gpt_bigcode", "plain, packed", attention_mask=seen))) == 2
