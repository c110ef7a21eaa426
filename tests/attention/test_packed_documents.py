"""Packed documents of transformers models: separated in the same way under every configuration."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import partita
from tests.kit import seeds
from tests.kit.models import FAMILIES
from tests.kit.ranks import on_ranks

MODELS = {
    "llama": partial(
        FAMILIES["llama"], vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, use_cache=True
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2)),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "units": {"activations": {"checkpoint": "units"}},
    "selective": {"activations": {"checkpoint": "selective"}},
    "tensor": {"parallel": {"tensor": 2}},
    "sequence": {"parallel": {"sequence": 2}},
}


def losses(name: str, config: str, **given: Any) -> list[float]:
    """Return the losses on the second document after two different first documents."""
    seeds.start()
    found = list[float]()
    model = MODELS[name]().train()
    for dropout in (module for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0
    with partita.initialize(model, CONFIGS[config]) as engine:
        tokens = torch.randint(64, (1, 24), generator=seeds.generator(1))
        labels = tokens.masked_fill(torch.arange(24) < 16, -100)
        positions = torch.arange(12).repeat(2)[None]
        for first in (1, 2):
            tokens[0, 3] = first
            found.append(engine(input_ids=tokens, labels=labels, position_ids=positions, **given).loss.item())
    return found


@pytest.mark.parametrize("name", MODELS)
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
