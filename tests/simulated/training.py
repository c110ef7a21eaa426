"""Train a small model on the simulated accelerator or on the CPU, and return the results."""

import gc
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.sharding import half
from tests.kit import seeds
from tests.kit.models import WIDTH, Block
from tests.kit.plans import LEAN, ON_DISK, ON_HOST
from tests.kit.training import Trained, assert_same_bits, small_buckets
from tests.parallel import stages

VOCAB, LENGTH = 32, 8
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1}


def on(stage: int, **offload: str) -> dict[str, Any]:
    return {"zero": {"stage": stage, "offload": offload}}


# Plans with the CPU's bits. Others differ: with fp32 masters of 16-bit parameters on the device, torch computes the
# update, while on the CPU partita's kernel does.
PLANS: dict[str, Mapping[str, Any]] = {
    "stage 0": on(0),
    "stage 1": on(1),
    "stage 2": on(2),
    "stage 3": on(3),
    "kept": {"zero": {"stage": 3, "keep_gathered": True}},
    "optimizer on host": on(3, optimizer="host"),
    "optimizer on host, stage 0": on(0, optimizer="host", gradients="none"),
    "optimizer on host, stage 1": on(1, optimizer="host"),
    "all on host": on(3, **ON_HOST),
    "parameters on host": on(3, parameters="host"),
    "all on disk": on(3, **ON_DISK),
    "optimizer on disk, gradients on device": on(2, optimizer="disk", gradients="none"),
    "bf16, optimizer on host": {**on(3, optimizer="host"), "precision": {"compute": "bf16"}},
    "bf16, optimizer on host, stage 1": {**on(1, optimizer="host"), "precision": {"compute": "bf16"}},
    "lean": {**on(3), "precision": LEAN},
    "lean, parameters on host": {**on(3, parameters="host"), "precision": LEAN},
    "lean, all on host": {**on(3, **ON_HOST), "precision": LEAN},
    "in backward": {**on(3), "precision": {"gradients": "in_backward"}},
    "in backward, stage 2": {**on(2), "precision": {"gradients": "in_backward"}},
    "lean, in backward, on host": {**on(2, **ON_HOST), "precision": {**LEAN, "gradients": "in_backward"}},
    "lean, in backward, on disk": {**on(3, **ON_DISK), "precision": {**LEAN, "gradients": "in_backward"}},
    "accumulated": {**on(3), "batch": {"accumulate": 3}},
    "codes": {**on(3), "communication": {"gradients": "int4", "parameters": "int8"}},
    "codes, bf16, optimizer on host": {
        **on(2, optimizer="host"),
        "precision": {"compute": "bf16"},
        "communication": {"gradients": "int8"},
    },
    "saved while training waits": {**on(3), "checkpoint": {"background": False}},
    "inputs on host": {**on(3), "activations": {"checkpoint": "units", "offload": "host"}},
    "inputs on disk": {**on(2), "activations": {"checkpoint": "selective", "offload": "disk"}},
    "accumulated, stage 1, on host": {**on(1, optimizer="host"), "batch": {"accumulate": 3}},
}

HIERARCHICAL = {"stage": 3, "hierarchical": True}
ONEBIT = {"name": "onebit_adam", "lr": 0.01}
# Plans for nodes of two ranks.
NODES: dict[str, Mapping[str, Any]] = {
    "stage 1 between nodes": on(1),
    "stage 2 between nodes": on(2),
    "changes": {"zero": HIERARCHICAL, "communication": {"gradients": "ternary", "parameters": "ternary"}},
    "hsdp": {"zero": {"stage": 3, "replicate": "nodes"}},
    "hsdp, int8": {"zero": {"stage": 3, "replicate": "nodes"}, "communication": {"gradients": "int8"}},
    "hsdp, ternary, on host": {
        "zero": {"stage": 3, "replicate": "nodes", "offload": {"optimizer": "host"}},
        "communication": {"gradients": "ternary"},
    },
    "DiLoCo, ternary": {**on(1), "communication": {"every": 2, "gradients": "ternary"}},
    "PowerSGD": {**on(2), "communication": {"gradients": "low_rank"}},
    "PowerSGD, on host": {**on(1, optimizer="host"), "communication": {"gradients": "low_rank"}},
    "1-bit Adam": {**on(1), "optimizer": ONEBIT, "communication": {"warmup_steps": 1}},
    "1-bit Adam, stage 3, on host": {
        **on(3, optimizer="host"),
        "optimizer": ONEBIT,
        "communication": {"warmup_steps": 1, "warmup": "int8"},
    },
    "changes, bf16, optimizer on host": {
        "zero": HIERARCHICAL | {"offload": {"optimizer": "host"}},
        "precision": {"compute": "bf16"},
        "communication": {"parameters": "int4", "warmup_steps": 1},
    },
}

# Plans for four ranks. The last bits differ from the CPU's, because the attention kernel is a different one.
AXES: dict[str, Mapping[str, Any]] = {
    "pipeline": {"parallel": {"pipeline": 2}, **on(3)},
    "pipeline, zero bubble": {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, **on(2, optimizer="host")},
    "pipeline, interleaved": {"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2}, **on(1)},
    "tensor": {"parallel": {"tensor": 2}, **on(3)},
    "tensor, pipeline": {"parallel": {"tensor": 2, "pipeline": 2}, **on(3, **ON_HOST)},
    "sequence": {"parallel": {"sequence": 2}, **on(3)},
}


class Model(nn.Module):
    """A model that returns the mean loss of tokens [samples, length]."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


def same(one: Trained, other: Trained) -> bool:
    """Return True if two runs are bitwise equal."""
    with suppress(AssertionError):
        assert_same_bits(one, other)
        return True
    return False


def open_engine(config: Mapping[str, Any]) -> partita.Engine:
    seeds.start()
    precision = {"compute": "fp32", **config.get("precision", {})}
    whole = {"optimizer": OPTIMIZER, "clip_grad_norm": 0.5, **config, "precision": precision}
    with small_buckets():
        engine = partita.initialize(Model(), whole)
    torch.set_num_threads(1)  # sums depend on the number of threads
    return engine


def train_step(engine: partita.Engine, step: int, trained: Trained | None) -> None:
    """Train one step; append its losses, which are read from the device, and its norm to ``trained``."""
    accumulate = engine.config.batch.accumulate
    for micro in range(accumulate if isinstance(accumulate, int) else 1):
        generator = seeds.generator(100 * step + 10 * micro + engine.mesh.rank)
        tokens = torch.randint(0, VOCAB, (3, LENGTH), generator=generator).to(engine.mesh.device, non_blocking=True)
        loss = engine(tokens)
        engine.backward(loss)
        outcome = engine.step()
        if trained is not None:
            trained.losses.append(loss.item())
    if trained is not None:
        trained.norms.append(outcome.grad_norm)


def train(config: Mapping[str, Any], num_steps: int = 3) -> Trained:
    trained = Trained()
    with open_engine(config) as engine:
        for step in range(num_steps):
            train_step(engine, step, trained)
        trained.weights = engine.state_dict()
    del engine
    gc.collect()  # free the engine's memory now, not at a random time
    return trained


def train_on_axes(config: Mapping[str, Any], num_steps: int = 2) -> Trained:
    """Train a decoder with `engine.train_batch`."""
    trained, settings = Trained(), {"precision": {"compute": "fp32"}, "batch": {"accumulate": 3}, **config}
    with small_buckets():
        engine = partita.initialize(
            stages.build("decoder"), {"optimizer": OPTIMIZER, "clip_grad_norm": 0.5, **settings}
        )
    torch.set_num_threads(1)
    with engine:
        for step in range(num_steps):
            numbers = [100 * step + 10 * micro + engine.mesh.coordinate("data") for micro in range(3)]
            batches = [stages.batch("decoder", number) for number in numbers]
            moved = [{key: value.to(engine.mesh.device) for key, value in batch.items()} for batch in batches]
            trained.losses.append(engine.train_batch(iter(moved)).item())
            trained.norms.append(engine.last_step.grad_norm)
        trained.weights = engine.state_dict()
    del engine
    gc.collect()
    return trained


def train_all(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Trained]:
    """Train under each plan, one after the other."""
    return {name: train(config) for name, config in configs.items()}


def on_nodes(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with the environment of nodes of two ranks."""
    local = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(int(os.environ["RANK"]) % 2)}
    with mock.patch.dict(os.environ, local):
        return function(*args)


def resume(config: Mapping[str, Any], folder: str) -> Trained:
    """Train two steps, with a checkpoint of the first written during the second; resume and repeat the second."""
    trained = Trained()
    with open_engine(config) as engine:
        train_step(engine, 0, trained)
        engine.save(folder)
        train_step(engine, 1, trained)
        engine.wait_for_checkpoint()
        engine.load(folder)
        train_step(engine, 1, trained)
        trained.weights = engine.state_dict()
    return trained


def simulated(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Call a function with the simulated accelerator as the device; return its result and the races."""
    from tests.simulated.device import register

    native = register()
    with mock.patch.object(half, "is_host", return_value=True):  # the simulated device uses the CPU's kernels
        result = function(*args)
    return result, native.races()
