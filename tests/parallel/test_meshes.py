"""Meshes of several axes: training is one process's, and the stages of ZeRO agree bit for bit."""

from typing import Any

import pytest
import torch

import partita
from partita import ConfigError
from partita.config.load import load_config
from partita.config.resolve import resolve
from tests.local import pool
from tests.matrix import matrix
from tests.parallel import training, zoo
from tests.parallel.training import ADAMW, CLIP, Trained

MICROS = 2
TIMEOUT_S = 400
TENSOR_AND_PIPELINE = {"tensor": 2, "pipeline": 2}
ON_HOST = {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}


def course(name: str, parallel: dict[str, int], zero: dict[str, Any], num_steps: int) -> Trained:
    """By ``train_batch``, in evaluation mode: there is no dropout."""
    config = {
        "parallel": parallel,
        "zero": zero,
        "batch": {"accumulate": MICROS},
        "clip_grad_norm": CLIP,
        "optimizer": {"name": "adamw", **ADAMW},
    }
    found, model = Trained(), zoo.build(name)
    with partita.initialize(model, config, loss_fn=lambda output, batch: zoo.loss_of(output)) as engine:
        first, num = engine.mesh.coordinate("data") * MICROS, engine.mesh.size("data") * MICROS
        for step in range(num_steps):
            micros = [training.part(name, step, first + micro, num) for micro in range(MICROS)]
            found.losses.append(engine.train_batch(micros).item())
            assert engine.last_step.grad_norm is not None
            found.norms.append(engine.last_step.grad_norm)
        with engine.gathered():
            found.weights = {key: param.detach().clone() for key, param in model.named_parameters()}
    return found


def check(name: str, world: int, parallel: dict[str, int], rows: list[dict[str, Any]], num_steps: int) -> None:
    num_data = world
    for size in parallel.values():
        num_data //= size
    (alone,) = pool.run(1, training.train_alone, name, num_data * MICROS, num_steps, timeout=TIMEOUT_S)
    before: Trained | None = None
    for zero in rows:
        first, *others = pool.run(world, course, name, parallel, zero, num_steps, timeout=TIMEOUT_S)
        assert first.losses == pytest.approx(alone.losses, abs=1e-5)
        assert first.norms == pytest.approx(alone.norms, rel=1e-5)
        for other in [*others, *([before] if before else [])]:
            assert (other.losses, other.norms) == (first.losses, first.norms)
            assert all(torch.equal(other.weights[key], weight) for key, weight in first.weights.items())
        before = first


@matrix(name=("llama", "decoder", "gpt2"))
def test_two_axes(name: str) -> None:
    check(name, 4, TENSOR_AND_PIPELINE, [{"stage": 0}, {"stage": 3}], num_steps=3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3moe"])
def test_three_axes(name: str) -> None:
    """Tensor 2 x pipeline 2 x data 2 on eight ranks."""
    rows = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, ON_HOST]
    check(name, 8, TENSOR_AND_PIPELINE, rows, num_steps=10)


@pytest.mark.parametrize("other", ["tensor", "pipeline"])
def test_slices_beside_other_axes_are_not_available(other: str) -> None:
    with pytest.raises(ConfigError, match=r"in this version\n(.*\n)*.*leave one of them out"):
        resolve(load_config({"parallel": {"sequence": 2, other: 2}}), 4, "cpu")
