"""One rank of one checkout: trains every course and writes what it computed as digests, as JSON.

    python -m benchmarks._bits SCOPE FOLDER CHECKPOINTS

SCOPE is a JSON object of :class:`Scope`; the result is FOLDER/RANK.json. Each course saves into FOLDER and resumes from
what lies in CHECKPOINTS, which may be the same. Only the public face of the library is used, so that any two of its
versions can be compared.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor

import partita
from tests.local.models import CASES, Batch, Case, parts

STEPS, RESUMED_STEPS, SAMPLES = 3, 2, 8
HOST = {"parameters": "host", "optimizer": "host"}
DISK = {"parameters": "disk", "optimizer": "disk"}
LEAN = {"compute": "bf16", "gradients": "bf16", "master": "split", "moments": "int8"}

PLANS: dict[str, dict[str, Any]] = {
    "0": {"zero": {"stage": 0}},
    "1": {"zero": {"stage": 1}},
    "2": {"zero": {"stage": 2}},
    "3": {"zero": {"stage": 3}},
    "3 kept": {"zero": {"stage": 3, "keep_gathered": True}},
    "hierarchical": {"zero": {"stage": 3, "hierarchical": True}},
    "1, optimizer on host": {"zero": {"stage": 1, "offload": {"optimizer": "host"}}},
    "2 on host": {"zero": {"stage": 2, "offload": HOST}},
    "3 on host": {"zero": {"stage": 3, "offload": HOST}},
    "3 on disk": {"zero": {"stage": 3, "offload": DISK}},
    "0 bf16": {"zero": {"stage": 0}, "precision": {"compute": "bf16"}},
    "2 bf16 lean": {"zero": {"stage": 2}, "precision": LEAN},
    "3 fp16": {"zero": {"stage": 3}, "precision": {"compute": "fp16", "loss_scale": 1024.0}},
    "3 lean on host": {"zero": {"stage": 3, "offload": HOST}, "precision": LEAN},
    "3 in backward": {"zero": {"stage": 3}, "precision": {"gradients": "in_backward"}},
    "1 in backward on disk": {"zero": {"stage": 1, "offload": DISK}, "precision": {"gradients": "in_backward"}},
    "2 accumulate": {"zero": {"stage": 2}, "batch": {"accumulate": 2}},
    "3 accumulate": {"zero": {"stage": 3}, "batch": {"accumulate": 2}},
    "3 sgd": {"zero": {"stage": 3}, "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1}},
    "1 lion, over the network": {
        "zero": {"stage": 1},
        "optimizer": {"name": "lion", "lr": 1e-3},
        "communication": {"within_node": "network"},
    },
    "1 int4": {"zero": {"stage": 1}, "communication": {"gradients": "int4", "parameters": "int4"}},
    "2 carrier": {
        "zero": {"stage": 2},
        "optimizer": {"name": "onebit_adam", "lr": 2e-3},
        "communication": {"gradients": "ternary", "parameters": "ternary", "carrier": 0.9, "warmup_steps": 1},
    },
    "0 1-bit Adam": {
        "zero": {"stage": 0},
        "optimizer": {"name": "onebit_adam", "lr": 2e-3},
        "communication": {"warmup_steps": 1},
    },
    "0 0/1 Adam": {"zero": {"stage": 0}, "optimizer": {"name": "zeroone_adam", "lr": 2e-3}},
    "0 low rank": {"zero": {"stage": 0}, "communication": {"gradients": "low_rank", "warmup_steps": 1}},
}
QUICK_PLANS = ("1", "2 bf16 lean", "3", "3 on disk", "3 in backward", "3 accumulate")
NUM_NODES = 2  # that the ranks of the hierarchical plan pretend to be spread over

Digests = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """Which courses are trained: every case under every plan."""

    cases: tuple[str, ...]
    plans: tuple[str, ...]


def main() -> int:
    scope, folder, checkpoints = Scope(**json.loads(sys.argv[1])), Path(sys.argv[2]), Path(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Digests] = {}
    for name in scope.cases:
        for plan in scope.plans:
            where = f"{name}-{plan}".replace(" ", "_").replace(",", "")
            seed_all(1000 + rank)  # checkpoints hold the states of all generators
            found[f"{name}, {plan}"] = course(CASES[name], plan, folder / where, checkpoints / where)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    return 0


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def course(case: Case, plan: str, own: Path, saved: Path) -> Digests:
    """Train, save into ``own``, resume from ``saved``, train on."""
    seen: Digests = {}
    with engine_of(case, plan) as engine:
        train(engine, case, STEPS, seen, "")
        seen["traffic"] = {str(key): str(count) for key, count in engine.traffic_report().rows.items()}
        path = engine.save(own)
        engine.any(False)  # all ranks have come here: the files are complete
        seen["files"] = {file.name: _digest_of_file(file) for file in sorted(path.iterdir())}
    with engine_of(case, plan) as engine:
        engine.load(saved)
        train(engine, case, RESUMED_STEPS, seen, "resumed, ")
        with tempfile.TemporaryDirectory() as exported:
            engine.export(exported)
            seen["export"] = {file.name: _digest_of_file(file) for file in sorted(Path(exported).iterdir())}
    return seen


def engine_of(case: Case, plan: str) -> partita.Engine:
    config = {"clip_grad_norm": 0.1, "optimizer": {"lr": 2e-3}, "checkpoint": {"background": False}, **PLANS[plan]}
    num_nodes = NUM_NODES if plan == "hierarchical" else 1
    num_local = int(os.environ["WORLD_SIZE"]) // num_nodes
    node = {"LOCAL_WORLD_SIZE": str(num_local), "LOCAL_RANK": str(int(os.environ["RANK"]) % num_local)}
    with mock.patch.dict(os.environ, node):
        return partita.initialize(case.build(), config)


def train(engine: partita.Engine, case: Case, num_steps: int, seen: Digests, prefix: str) -> None:
    """Train, and note every loss, norm, gradient, weight and optimizer state."""
    asked = engine.config.batch.accumulate
    accumulate = 1 if asked == "auto" else asked
    losses, norms = [], []
    for micro in islice(micro_batches(case, accumulate), num_steps * accumulate):
        loss = case.loss(engine(**micro))
        engine.backward(loss)
        result = engine.step()
        losses.append(float(loss.item()).hex())
        norms.append(None if result.grad_norm is None else result.grad_norm.hex())
    seen[f"{prefix}losses"], seen[f"{prefix}norms"] = losses, norms
    seen[f"{prefix}weights"] = {name: _digest(value) for name, value in engine.state_dict().items()}
    seen[f"{prefix}optimizer"] = {
        f"{name}.{key}": _digest(torch.as_tensor(value))
        for name, _ in engine.module.named_parameters()
        for key, value in sorted(engine.optimizer_state(name).items())
    }


def micro_batches(case: Case, accumulate: int) -> Iterator[Batch]:
    """This rank's parts of one batch after another."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for batch in case.batches(SAMPLES):
        yield from parts(parts(batch, world)[rank], accumulate)


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]}"


def _digest_of_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
