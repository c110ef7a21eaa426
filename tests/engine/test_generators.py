"""No public call draws from the user's random generators or seeds them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.integrations.huggingface.generation import hook_generation, unhook_generation
from partita.train.decoder import Decoder, DecoderShape
from tests.integrations.huggingface.runs import llama
from tests.kit.models import WIDTH, Stack, inputs
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

VOCABULARY, LENGTH = 32, 24


class Drawing(torch.optim.SGD):
    """Optimizer that the library does not know, so that initialize tries a step, which draws random numbers."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(1), random.random(), numpy.random.rand()
        return super().step(closure)


def states() -> tuple[Any, ...]:
    kind, keys, *rest = numpy.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, list(keys), *rest


class Watch:
    """Caller of functions that records those which change the state of a generator."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = states()
        result = call(*args, **kwargs)
        if states() != before:
            self.changed.append(name)
        return result


def stack(kind: str) -> nn.Module:
    """Return a model on the host or on meta; for "read by rank 0", on the host on rank 0 and on meta elsewhere."""
    with torch.device("meta" if kind == "meta" or (kind == "read by rank 0" and rank()) else "cpu"):
        return Stack(3)


def loss_of(engine: Any) -> Tensor:
    found: Tensor = engine(inputs(rank(), 0)).square().mean()
    return found


def calls_on_a_stack(stage: int, folder: Path) -> list[str]:
    seen, config = Watch(), {"zero": {"stage": stage}, "checkpoint": {"background": False}}

    def loss_fn(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    for kind in ("host", "meta", "read by rank 0"):
        engine = seen(f"initialize, {kind}", partita.initialize, stack(kind), config, loss_fn=loss_fn)
        engine.backward(loss_of(engine))
        seen("gradient", engine.gradient, "first.weight")
        seen("clip_grad_norm", engine.clip_grad_norm, 1.0)
        seen("step", engine.step)
        seen("optimizer_state", engine.optimizer_state, "first.weight")
        seen("train_batch", engine.train_batch, iter([inputs(rank(), 1)]))
        seen("eval_batch", engine.eval_batch, [inputs(rank(), 2)])
        seen("state_dict", engine.state_dict)
        block = seen("gathered", engine.gathered, modify=True)
        seen("gathered begins", block.__enter__)
        seen("gathered ends", block.__exit__, None, None, None)
        seen("save", engine.save, folder / kind)
        seen("load", engine.load, folder / kind)  # restores generator states that equal the current ones
        seen("load, only_model", engine.load, folder / kind, only_model=True)
        seen("export", engine.export, folder / f"{kind} exported")
        seen("memory_report", engine.memory_report)
        seen("close", engine.close, whole=True)
    for kind in ("host", "meta"):
        weights = folder / "meta exported"
        engine = seen(f"initialize, {kind}, weights=", partita.initialize, stack(kind), config, weights=weights)
        seen("backward", engine.backward, loss_of(engine))
        seen("close", engine.close)
    return seen.changed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_call_draws(stage: int, tmp_path: Path) -> None:
    assert on_ranks(2, calls_on_a_stack, stage, tmp_path) == [[], []]


def trial_of_an_optimizer() -> list[str]:
    seen, model = Watch(), Stack(2)
    engine = seen(
        "initialize", partita.initialize, model, {"zero": {"stage": 1}}, optimizer=Drawing(model.parameters(), lr=0.1)
    )
    engine.close()
    return seen.changed


def test_the_trial_of_an_optimizer_does_not_draw() -> None:
    assert on_ranks(2, trial_of_an_optimizer) == [[], []]


def batch_on_an_axis(axis: str) -> list[str]:
    """Return the calls that draw in a first batch and in the checks that it causes."""
    seen = Watch()
    model = Decoder(DecoderShape(layers=2, width=WIDTH, heads=4, kv_heads=2, ffn_width=32, vocab=VOCABULARY))
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY

    def loss_fn(logits: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.flatten())

    config = {"parallel": {axis: 2}, "zero": {"stage": 1}}
    engine = seen(f"initialize, {axis}", partita.initialize, model, config, loss_fn=loss_fn)
    seen(f"train_batch, {axis}", engine.train_batch, iter([tokens]))
    seen(f"eval_batch, {axis}", engine.eval_batch, [tokens])
    seen("close", engine.close)
    return seen.changed


@pytest.mark.parametrize("axis", ["tensor", "sequence", "pipeline"])
def test_no_first_batch_draws(axis: str) -> None:
    assert on_ranks(2, batch_on_an_axis, axis) == [[], []]


def generation() -> list[str]:
    """Return the calls that draw in greedy generation, which needs no random numbers."""
    seen = Watch()
    engine = partita.initialize(llama(), {"zero": {"stage": 3}})
    hook_generation(engine)
    tokens = torch.arange(8).view(2, 4)
    seen("generate", engine.module.generate, tokens, max_new_tokens=3, do_sample=False)
    unhook_generation(engine.module)
    engine.close()
    return seen.changed


def test_generation_does_not_draw() -> None:
    assert on_ranks(2, generation) == [[], []]
