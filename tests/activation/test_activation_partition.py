"""Inputs of recomputed modules that are equal on all tensor ranks, sharded over them: the bits of full inputs, memory,
and traffic.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import partita
from partita.activation.inputs import NUM_STAYING
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.table.traffic import TrafficKey
from tests.kit import seeds
from tests.kit.live_bytes import LiveBytes
from tests.kit.models import FAMILIES
from tests.kit.ranks import on_ranks

LAYERS, WIDTH, VOCAB, LENGTH = NUM_STAYING + 3, 24, 40, 10
UNITS: dict[str, Any] = {"checkpoint": "units"}
SPLIT: dict[str, Any] = {**UNITS, "partition": True}
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "whole": UNITS,
    "split": SPLIT,
    "split, selective": {**SPLIT, "checkpoint": "selective"},
    "split, on disk": {**SPLIT, "offload": "disk"},
}
TENSOR: dict[str, Any] = {"parallel": {"tensor": 2}}


def gpt2() -> nn.Module:
    """Return a GPT-2 model with dropout."""
    shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 16, "vocab_size": VOCAB}
    return GPT2LMHeadModel(GPT2Config(**shape, use_cache=False, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    """Return a Llama model with dropout."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_key_value_heads": 4, "vocab_size": VOCAB}
    return FAMILIES["llama"](**shape, num_hidden_layers=LAYERS, attention_dropout=0.2)


def built(build: Callable[[], nn.Module]) -> nn.Module:
    seeds.start()
    return build()


def tokens(step: int, data: int = 0) -> torch.Tensor:
    """Return tokens [2, odd length], which differ by step and data rank."""
    return torch.randint(VOCAB, (2, LENGTH - 1 + 2 * (step % 2)), generator=seeds.generator(100 * data + step))


def course(build: Callable[[], nn.Module], config: dict[str, Any], num_steps: int = 3) -> list[Any]:
    """Train; return the losses and norms, and the weights at the end."""
    found: list[Any] = []
    with partita.initialize(built(build), {"seed": 5, "clip_grad_norm": 0.5, **TENSOR, **config}) as engine:
        for step in range(num_steps):
            ids = tokens(step, engine.mesh.coordinate("data"))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            found += [loss.item(), engine.step().grad_norm]
        with engine.gathered():
            found += [param.tolist() for param in engine.module.parameters()]
    return found


def courses(build: Callable[[], nn.Module], stages: tuple[int, ...]) -> dict[tuple[int, str], list[Any]]:
    return {
        (stage, way): course(build, {"zero": {"stage": stage}, "activations": settings})
        for stage in stages
        for way, settings in WAYS.items()
    }


def whole_after_forward(activations: dict[str, Any]) -> int:
    """Return the number of tensors of the size of a block's input that a forward keeps."""
    with partita.initialize(built(gpt2), {**TENSOR, "activations": activations}) as engine:
        ids = tokens(0)
        with LiveBytes() as live:
            loss = engine(input_ids=ids, labels=ids).loss
            assert loss.requires_grad
            return sum(num == ids.numel() * WIDTH * 4 for num in live.by_storage.values())


def kept_and_gathered() -> None:
    """Check the memory and the traffic of sharded inputs. The inputs of the last blocks stay full; the one before them
    is still full when forward ends.
    """
    assert whole_after_forward(UNITS) - whole_after_forward(SPLIT) == LAYERS - NUM_STAYING - 1
    with partita.initialize(built(gpt2), {**TENSOR, "activations": SPLIT}) as engine:
        ids = tokens(0)
        part = ids.numel() * WIDTH * 4 // 2
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            assert engine.memory_report().held["activations", "device"] == (LAYERS - NUM_STAYING) * part
            before = engine.traffic_report()
            engine.backward(loss)
            row = engine.traffic_report().since(before).rows[TrafficKey("all_gather", ("tensor",), "activations")]
            assert row.calls == LAYERS - NUM_STAYING - 1
            assert row.sent_bytes == row.calls * part
            engine.step()


def split_already() -> None:
    """Recompute modules whose inputs are already split over the tensor ranks; a warning says that they differ."""
    config = {**TENSOR, "activations": {"checkpoint": ["*.act_fn"], "partition": True}}
    with partita.initialize(built(llama), config) as engine:
        ids = tokens(0)
        with pytest.warns(
            UserWarning, match="activations.partition: the inputs of '.*' differ between the ranks of tensor"
        ):
            loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        assert engine.step().stepped


def test_split_inputs_have_the_bits_of_whole_ones() -> None:
    for found in on_ranks(2, courses, gpt2, (3,), timeout=240):
        assert all(numbers == found[stage, "none"] for (stage, _), numbers in found.items())


def test_parts_are_kept_and_gathered() -> None:
    on_ranks(2, kept_and_gathered)


def test_what_ranks_have_different_stays_whole() -> None:
    on_ranks(2, split_already)


def test_sequence_ranks_keep_their_own_positions_anyway() -> None:
    (notice,) = resolve(Config(activations=SPLIT, parallel={"sequence": 2}), 2, "cpu").notices
    assert notice.startswith("ignored: activations.partition")
