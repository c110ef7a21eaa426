"""Ten steps of training under a mesh, beside the same in one process by PyTorch alone."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import partita
from tests.parallel import zoo

STEPS = 10
SAMPLES = 4  # of a step, over all data ranks
ADAMW: dict[str, Any] = {"lr": 2e-3, "weight_decay": 0.01, "eps": 1e-6}
CLIP = 0.5
FLOOR = 1e-8  # a gradient below it is none


@dataclass
class Trained:
    """The mean loss and the norm of each step, whole gradients of the first, and whole weights at the end."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


def part(name: str, step: int, index: int, num: int) -> zoo.Batch:
    """The samples of a step that one of ``num`` data ranks is fed."""
    size = SAMPLES // num
    return {key: value[index * size : (index + 1) * size] for key, value in zoo.batch(name, step, SAMPLES).items()}


def train(name: str, config: dict[str, Any], num_steps: int = STEPS) -> Trained:
    """By an engine, in evaluation mode: there is no dropout."""
    settings = {"clip_grad_norm": CLIP, "optimizer": {"name": "adamw", **ADAMW}, **config}
    result, model = Trained(), zoo.build(name)
    with partita.initialize(model, settings) as engine:
        index, num = engine.mesh.coordinate("data"), engine.mesh.size("data")
        for step in range(num_steps):
            loss = zoo.loss_of(engine(**part(name, step, index, num)))
            engine.backward(loss)
            if step == 0:
                for key, _ in model.named_parameters():
                    gradient = engine.gradient(key)
                    if gradient is not None:
                        result.gradients[key] = gradient
            done = engine.step()
            assert done.stepped
            assert done.grad_norm is not None
            result.losses.append(engine.mean(loss).item())
            result.norms.append(done.grad_norm)
        with engine.gathered():
            result.weights = {key: param.detach().clone() for key, param in model.named_parameters()}
        rows = engine.traffic_report().rows
        result.calls = {key.collective: row.calls for key, row in rows.items() if key.purpose == "tensor"}
    return result


def train_alone(name: str, num_parts: int, num_steps: int = STEPS) -> Trained:
    """By PyTorch in one process, on the parts of all data ranks."""
    result, model = Trained(), zoo.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(num_steps):
        total = 0.0
        for index in range(num_parts):
            loss = zoo.loss_of(model(**part(name, step, index, num_parts))) / num_parts
            loss.backward()
            total += loss.item()
        if step == 0:
            result.gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        result.norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        result.losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {key: param.detach().clone() for key, param in model.named_parameters()}
    return result


def errors(found: Trained, expected: Trained) -> dict[str, float]:
    """What is further off than issue's bounds: losses 1e-5, gradients 1e-5 of the parameter's largest, norms 1e-5."""
    far = {}
    for step, (one, two) in enumerate(zip(found.losses, expected.losses, strict=True)):
        far[f"loss of step {step}"] = abs(one - two)
    for step, (one, two) in enumerate(zip(found.norms, expected.norms, strict=True)):
        far[f"norm of step {step}"] = abs(one - two) / two
    assert found.gradients.keys() == expected.gradients.keys()
    for key, gradient in expected.gradients.items():
        largest = max(gradient.abs().max().item(), FLOOR / 1e-5)
        far[f"gradient of {key}"] = (found.gradients[key] - gradient).abs().max().item() / largest
    return {what: amount for what, amount in far.items() if not amount <= 1e-5}
