"""Tiled losses and tiled modules of real models, on several ranks: the numbers and the traffic without tiles."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, T5Config, T5ForConditionalGeneration

import partita
from partita.activation.deferred_logits import DeferredLogits
from partita.table.traffic import TrafficReport
from tests.features import parity
from tests.kit import seeds
from tests.kit.models import CASES, FAMILIES, VOCAB
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

ROWS = {"loss": {"tiled": 7 * 4 * VOCAB}}  # seven rows, which leave an incomplete last tile
SETTINGS: dict[str, dict[str, Any]] = {"none": {}, "tiled": ROWS}
PATTERNS = {"decoder": "FeedForward", "gpt2": "*.mlp", "llama": "LlamaMLP", "bert": "*.intermediate"}

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "use_cache": True,
}
MODELS: dict[str, Any] = {
    "llama": partial(FAMILIES["llama"], **SHAPE),
    "tied llama": partial(FAMILIES["llama"], tie_word_embeddings=True, **SHAPE),
    "soft-capped gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB, head_dim=16, num_key_value_heads=1, attn_implementation="eager", pad_token_id=0, **SHAPE
        )
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}


def batch() -> dict[str, torch.Tensor]:
    """Return this rank's batch. Lengths, and so the numbers of tiles, differ by rank; some labels are ignored."""
    tokens = torch.randint(1, VOCAB, (2, 9 + 3 * rank()), generator=seeds.generator(rank()))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100)}


def first_gradients(
    name: str, zero: dict[str, Any], settings: dict[str, Any], num_items: int | None
) -> tuple[float, dict[str, Any], TrafficReport]:
    """Return the loss, the full gradients and the traffic of one batch."""
    seeds.start()
    model = MODELS[name]().eval()
    with partita.initialize(model, {"zero": zero, **settings}) as engine:
        inputs: dict[str, Any] = batch()
        if num_items is not None:
            inputs["num_items_in_batch"] = num_items
        if name != "t5":
            inputs["use_cache"] = False
        before = engine.traffic_report()
        output = engine(**inputs)
        assert isinstance(output.logits, DeferredLogits) == bool(settings)
        engine.backward(output.loss)
        gradients = {name: engine.gradient(name) for name, _ in model.named_parameters()}
        engine.step()
        return output.loss.item(), gradients, engine.traffic_report().since(before)


def compare_gradients(name: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for num_items in (None,) if name == "t5" else (None, 41):
            zero = {"stage": stage}
            loss, expected, sent = first_gradients(name, zero, {}, num_items)
            tiled_loss, gradients, tiled_sent = first_gradients(name, zero, ROWS, num_items)
            assert tiled_loss == pytest.approx(loss, rel=1e-6)
            for key, gradient in gradients.items():
                largest = expected[key].abs().max().item()
                assert (gradient - expected[key]).abs().max().item() <= 3e-6 * largest, f"stage {stage}: {key}"
            assert tiled_sent == sent, f"stage {stage}:\n{tiled_sent}\n{sent}"


@pytest.mark.parametrize("name", MODELS)
def test_transformers_losses(name: str) -> None:
    """Tiled losses have the same gradients as losses without tiles, and the same traffic."""
    on_ranks(2, compare_gradients, name, (0, 3) if name == "tied llama" else (3,), timeout=240)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_transformers_losses_at_every_stage(name: str) -> None:
    on_ranks(2, compare_gradients, name, (0, 1, 2, 3), timeout=240)


@pytest.mark.parametrize("name", [*PATTERNS, pytest.param("mixtral", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_models_train_as_without(name: str, world: int) -> None:
    plans = ("3",) if world == 1 else ("0", "1", "2", "3", "3-kept", "3-host")
    settings = dict(SETTINGS)
    if name in PATTERNS:
        settings["modules"] = {"tiled": {"mlp": [PATTERNS[name]]}}
        settings["both"] = {**ROWS, **settings["modules"], "activations": {"checkpoint": "units"}}
    for courses in on_ranks(world, parity.courses_with, name, plans, settings, timeout=240):
        for (plan, setting), course in courses.items():
            plain = courses[plan, "none"]
            what = f"{plan}, {setting}"
            assert parity.largest_ratio(course.losses, plain.losses) < 1e-4, what  # after ten updates
            for key, gradient in course.gradients.items():
                assert key.endswith(parity.ZERO_GRADIENTS) or parity.error(gradient, plain.gradients[key]) < 1e-5, (
                    f"{what}: {key}"
                )


def test_cases_are_language_models() -> None:
    assert set(PATTERNS) <= set(CASES)
