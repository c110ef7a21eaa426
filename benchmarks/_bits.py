"""One rank of one checkout: train all runs and write digests of the results as JSON.

    python -m benchmarks._bits SCOPE FOLDER CHECKPOINTS

SCOPE is a JSON object of :class:`Scope`; the result is FOLDER/RANK.json. Each run saves into FOLDER and resumes from a
checkpoint in CHECKPOINTS, which may be the same folder. Only the library's public API is used, so that any two versions
can be compared.
"""

import hashlib
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor

import partita
from tests.kit.models import CASES, Batch, Case, parts

STEPS, RESUMED_STEPS, SAMPLES = 3, 2, 8
HOST = {"parameters": "host", "optimizer": "host"}
DISK = {"parameters": "disk", "optimizer": "disk"}
LEAN = {"compute": "bf16", "gradients": "bf16", "master": "split", "moments": "int8"}
ONEBIT = {"name": "onebit_adam", "lr": 2e-3}
LANGUAGE = ("decoder", "gpt2", "llama", "mixtral")  # models that all parallel axes can split


@dataclass(frozen=True)
class Plan:
    """A config with its training settings."""

    config: Mapping[str, Any]
    nodes: int = 1  # number of emulated nodes, over which the ranks are spread
    worlds: tuple[int, ...] = (1, 2, 4)
    cases: tuple[str, ...] = tuple(CASES)
    loop: str = "steps"  # or "batches" (engine.train_batch), "no_sync", "unfreezing"


def _zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage, **settings}}


def _sent(stage: int, **communication: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage}, "communication": communication}


def _axes(stage: int, **parallel: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage}, "parallel": parallel}


ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble"}
PLANS: dict[str, Plan] = {
    "0": Plan(_zero(0)),
    "1": Plan(_zero(1)),
    "2": Plan(_zero(2)),
    "3": Plan(_zero(3)),
    "3 kept": Plan(_zero(3, keep_gathered=True)),
    "3 kept gradients": Plan({**_zero(3, keep_gathered=True, keep_gradients=True), "batch": {"accumulate": 2}}),
    "hierarchical": Plan(_zero(3, hierarchical=True), nodes=2, worlds=(4,)),
    "hierarchical, updates between nodes": Plan(
        {**_zero(3, hierarchical=True), "communication": {"gradients": "ternary", "parameters": "ternary"}},
        nodes=2,
        worlds=(4,),
    ),
    "hsdp": Plan(_zero(3, replicate="nodes"), nodes=2, worlds=(4,)),
    "hsdp, int8": Plan({**_zero(3, replicate="nodes"), "communication": {"gradients": "int8"}}, nodes=2, worlds=(4,)),
    "1 between nodes": Plan(_zero(1), nodes=2, worlds=(2, 4)),
    "1, optimizer on host": Plan(_zero(1, offload={"optimizer": "host"})),
    "2 on host": Plan(_zero(2, offload=HOST)),
    "3 on host": Plan(_zero(3, offload=HOST)),
    "3 on disk": Plan(_zero(3, offload=DISK)),
    "0 bf16": Plan({**_zero(0), "precision": {"compute": "bf16"}}),
    "2 bf16 lean": Plan({**_zero(2), "precision": LEAN}),
    "3 fp16": Plan({**_zero(3), "precision": {"compute": "fp16", "loss_scale": 1024.0}}),
    "3 lean on host": Plan({**_zero(3, offload=HOST), "precision": LEAN}),
    "3 in backward": Plan({**_zero(3), "precision": {"gradients": "in_backward"}}),
    "1 in backward on disk": Plan({**_zero(1, offload=DISK), "precision": {"gradients": "in_backward"}}),
    "2 accumulate": Plan({**_zero(2), "batch": {"accumulate": 2}}),
    "3 accumulate": Plan({**_zero(3), "batch": {"accumulate": 2}}),
    "2 no_sync": Plan({**_zero(2), "batch": {"accumulate": 2}}, loop="no_sync"),
    "3 unfreezing": Plan(_zero(3), loop="unfreezing"),
    "3 sgd": Plan({**_zero(3), "optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.1}}),
    "1 lion, over the network": Plan(
        {**_sent(1, within_node="network"), "optimizer": {"name": "lion", "lr": 1e-3}},
    ),
    "1 int4": Plan(_sent(1, gradients="int4", parameters="int4")),
    "1 int4 accumulate": Plan({**_sent(1, gradients="int4"), "batch": {"accumulate": 2}}),
    "2 ternary": Plan(_sent(2, gradients="ternary")),
    "3 topk": Plan(_sent(3, gradients="topk")),
    "1 ternary both, 8-bit start": Plan(
        _sent(1, gradients="ternary", parameters="ternary", warmup="int8", warmup_steps=2)
    ),
    "3 int8 gathers": Plan(_sent(3, parameters="int8")),
    "2 1-bit Adam, gradients": Plan(
        {
            **_sent(2, gradients="ternary", parameters="ternary", warmup_steps=1),
            "optimizer": {**ONEBIT, "sends": "gradients"},
        }
    ),
    "0 1-bit Adam": Plan({**_sent(0, warmup_steps=1), "optimizer": ONEBIT}),
    "1 1-bit Adam": Plan({**_sent(1, warmup_steps=1), "optimizer": ONEBIT}),
    "0 low rank": Plan(_sent(0, gradients="low_rank", warmup_steps=1)),
    "2 low rank": Plan(_sent(2, gradients="low_rank", warmup_steps=1)),
    "1 DiLoCo": Plan(_sent(1, every=2), nodes=2, worlds=(2, 4)),
    "1 DiLoCo, ternary": Plan(_sent(1, every=2, gradients="ternary"), nodes=2, worlds=(2, 4)),
    "1 tensor": Plan(_axes(1, tensor=2), worlds=(2, 4), cases=LANGUAGE),
    "3 tensor": Plan(_axes(3, tensor=2), worlds=(2, 4), cases=LANGUAGE),
    "3 sequence": Plan(_axes(3, sequence=2), worlds=(2, 4), cases=LANGUAGE),
    "2 pipeline": Plan(
        {**_axes(2, pipeline=2), "batch": {"accumulate": 2}}, worlds=(2, 4), cases=LANGUAGE, loop="batches"
    ),
    "1 zero bubble": Plan(
        {**_axes(1, **ZERO_BUBBLE), "batch": {"accumulate": 2}}, worlds=(2, 4), cases=LANGUAGE, loop="batches"
    ),
    "3 tensor, pipeline": Plan(
        {**_axes(3, tensor=2, pipeline=2), "batch": {"accumulate": 2}}, worlds=(4,), cases=LANGUAGE, loop="batches"
    ),
}
QUICK_PLANS = ("1", "2 bf16 lean", "3", "3 on disk", "3 in backward", "3 accumulate")


def plans_of(case: str, world: int, names: Sequence[str] = tuple(PLANS)) -> tuple[str, ...]:
    """Return the names of the plans under which a case is trained on ``world`` ranks."""
    return tuple(name for name in names if world in PLANS[name].worlds and case in PLANS[name].cases)


Digests = dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """The runs: every case under every plan."""

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
            found[f"{name}, {plan}"] = train_and_resume(CASES[name], plan, folder / where, checkpoints / where)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    return 0


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def train_and_resume(case: Case, name: str, own: Path, saved: Path) -> Digests:
    """Train, save into ``own``, resume from ``saved``, and continue training."""
    plan = PLANS[name]
    seen: Digests = {}
    with engine_of(case, plan) as engine:
        train(engine, case, plan, STEPS, seen, "")
        seen["traffic"] = {str(key): str(count) for key, count in engine.traffic_report().rows.items()}
        path = engine.save(own)
        engine.any(False)  # every rank has arrived, so the files are complete
        seen["files"] = {file.name: _digest_of_file(file) for file in sorted(path.iterdir())}
    with engine_of(case, plan) as engine:
        engine.load(saved)
        train(engine, case, plan, RESUMED_STEPS, seen, "resumed, ")
        with tempfile.TemporaryDirectory() as exported:
            engine.export(exported)
            seen["export"] = {file.name: _digest_of_file(file) for file in sorted(Path(exported).iterdir())}
    return seen


def engine_of(case: Case, plan: Plan) -> partita.Engine:
    config = {"clip_grad_norm": 0.1, "optimizer": {"lr": 2e-3}, "checkpoint": {"background": False}, **plan.config}
    num_local = int(os.environ["WORLD_SIZE"]) // plan.nodes
    node = {"LOCAL_WORLD_SIZE": str(num_local), "LOCAL_RANK": str(int(os.environ["RANK"]) % num_local)}
    with mock.patch.dict(os.environ, node):
        return partita.initialize(case.build(), config)


def train(engine: partita.Engine, case: Case, plan: Plan, num_steps: int, seen: Digests, prefix: str) -> None:
    """Train, and record every loss, norm, weight and optimizer state."""
    asked = engine.config.batch.accumulate
    accumulate = 1 if asked == "auto" else asked
    batches = micro_batches(engine, case, accumulate)
    losses, norms = [], []
    for step in range(num_steps):
        if plan.loop == "unfreezing":
            for param in list(engine.module.parameters())[::2]:
                param.requires_grad_(step != 1)
        if plan.loop == "batches":
            losses.append(float(engine.train_batch(batches)).hex())
            continue
        for micro in range(accumulate):
            with engine.no_sync() if plan.loop == "no_sync" and micro < accumulate - 1 else nullcontext():
                loss = case.loss(engine(**next(batches)))
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


def micro_batches(engine: partita.Engine, case: Case, accumulate: int) -> Iterator[Batch]:
    """Yield the micro-batches of this rank's data coordinate."""
    replica, num_replicas = engine.mesh.coordinate("data"), engine.mesh.size("data")
    for batch in case.batches(SAMPLES):
        yield from parts(parts(batch, num_replicas)[replica], accumulate)


def _digest(value: Tensor) -> str:
    flat = value.detach().cpu().contiguous().flatten().view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]}"


def _digest_of_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
