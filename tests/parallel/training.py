"""Ten training steps on a mesh, and the same steps with plain PyTorch in one process."""

from functools import partial
from typing import Any

import torch

import partita
from tests.kit.training import Loss, Trained, train_engine, train_module
from tests.parallel import zoo

STEPS = 10
SAMPLES = 4  # per step, over all data ranks
ADAMW: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.01, "eps": 1e-6}
CLIP = 0.5


def part(name: str, step: int, index: int, num: int) -> zoo.Batch:
    """Return the samples of a step for data rank ``index`` of ``num``."""
    size = SAMPLES // num
    return {key: value[index * size : (index + 1) * size] for key, value in zoo.batch(name, step, SAMPLES).items()}


def loss_of(name: str, num: int) -> Loss:
    """Return the loss function for the samples of one of ``num`` data ranks."""
    return lambda model, index, step: zoo.loss_of(model(**part(name, step, index, num)))


def train(name: str, config: dict[str, Any], num_steps: int = STEPS) -> Trained:
    """Train with an engine; keep the gradients of the first step, and record losses averaged over the data ranks."""
    settings = {"clip_grad_norm": CLIP, "optimizer": {"name": "adamw", **ADAMW}, **config}
    with partita.initialize(zoo.build(name), settings) as engine:
        index, num = engine.mesh.coordinate("data"), engine.mesh.size("data")
        result = train_engine(engine, loss_of(name, num), num_steps, data=index, keep=(0,), mean=True)
    assert all(result.stepped)
    assert None not in result.norms
    return result


def train_alone(name: str, num_parts: int, num_steps: int = STEPS) -> Trained:
    """Train with PyTorch in one process, on the parts of all data ranks."""
    model, loss, optimizer = zoo.build(name), loss_of(name, num_parts), partial(torch.optim.AdamW, **ADAMW)
    return train_module(model, loss, num_steps, num_data=num_parts, own=None, optimizer=optimizer, clip=CLIP, keep=(0,))
