"""Sampling of text from a model."""

import torch

from partita.train.job import DataSection, ModelSection, SampleSection
from partita.train.models import build_model
from partita.train.sample import write_sample
from tests.kit import seeds

READY = build_model(ModelSection(layers=1, width=32), DataSection())


def sample(context: int = 16, **settings: object) -> str:
    section = SampleSection.model_validate({"prompt": "ab", "tokens": 12, **settings})
    return write_sample(READY, section, context)


def test_it_continues_the_prompt_by_as_many_tokens_as_asked() -> None:
    seen: list[torch.Tensor] = []
    hook = READY.module.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        text = sample(context=5)
    finally:
        hook.remove()
    assert text.startswith("ab")
    assert [tokens.shape[1] for tokens in seen] == [2, 3, 4] + [5] * 9


def test_the_likeliest_token_is_taken_at_temperature_0() -> None:
    assert sample(temperature=0, seed=1) == sample(temperature=0, seed=2)


def test_the_seed_decides_the_draws() -> None:
    seeds.start(1)
    first = sample(temperature=2.0, seed=1)
    seeds.start(2)
    assert sample(temperature=2.0, seed=1) == first
    assert sample(temperature=2.0, seed=3) != first


def test_it_leaves_the_mode_as_it_was() -> None:
    for mode in (True, False):
        READY.module.train(mode)
        sample()
        assert READY.module.training is mode
    assert not any(parameter.grad is not None for parameter in READY.module.parameters())
