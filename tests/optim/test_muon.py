"""Muon: the same bits at every stage and tier, the results of torch.optim.Muon on one process, under every axis."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita import ConfigError
from partita.config.schema import Muon as MuonSection
from partita.optim import owners
from partita.optim.matrices import MatrixForm, describe, equal_parts, find_matrices
from partita.optim.newton_schulz import EPS, orthogonalize, scale_of
from tests.kit import seeds
from tests.kit.models import Case, next_token_batch, tiny
from tests.kit.plans import TIERS, ZERO, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import (
    Trained,
    assert_exact,
    assert_same_bits,
    loss_of,
    quiet,
    rank,
    train_engine,
    train_module,
    whole_weights,
    world,
)

STEPS = 10
OPTIMIZER = {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
CONFIG: dict[str, Any] = {"optimizer": OPTIMIZER, "clip_grad_norm": 0.5}


def muon(**settings: Any) -> dict[str, Any]:
    return {**OPTIMIZER, "muon": settings}


def trained(case: Case, config: Mapping[str, Any], *, steps: int = 3, data: int | None = None) -> Trained:
    with partita.initialize(case.build(), {**CONFIG, **config}, loss_fn=case.loss_of_batch) as engine:
        return train_engine(engine, loss_of(case), steps, data=data, keep=())


# -- stages and tiers --------------------------------------------------------------------------------------------------


def stages_have_the_same_bits(name: str, steps: int) -> None:
    case = tiny(name)
    plans = ZERO | TIERS if dist.get_world_size() == 2 else {key: ZERO[key] for key in ("0", "1", "3")}
    results = {key: trained(case, {"zero": zero}, steps=steps) for key, zero in plans.items()}
    assert all(norm is not None and norm > 0.5 for norm in results["0"].norms), "nothing is clipped"
    for key, result in results.items():
        assert_same_bits(result, results["0"], f"stage {key}")


@pytest.mark.parametrize("name", sampled(["llama", "gpt2", "qwen3moe", "phi3", "t5"], "llama", "qwen3moe"))
def test_stages_and_tiers_have_the_same_bits(name: str) -> None:
    on_ranks(2, stages_have_the_same_bits, name, STEPS if name == "llama" else 3)


def test_four_ranks_have_the_same_bits() -> None:
    on_ranks(4, stages_have_the_same_bits, "llama", 3)


# -- against torch.optim.Muon ------------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """torch.optim.Muon on the matrices of an unfused model, in fp32, and AdamW on the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = find_matrices(model)
        chosen, rest = [], []
        for param in model.parameters():
            (chosen if id(param) in matrices else rest).append(param)
        assert chosen
        assert rest
        settings = {"lr": OPTIMIZER["lr"], "weight_decay": OPTIMIZER["weight_decay"]}
        self._muon = torch.optim.Muon(chosen, adjust_lr_fn="match_rms_adamw", **settings)
        self._adamw = torch.optim.AdamW(rest, eps=OPTIMIZER["eps"], **settings)
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        with mock.patch.object(Tensor, "bfloat16", Tensor.clone):
            self._muon.step()
        self._adamw.step()


def plain(case: Case, *, steps: int, num_data: int, own: int | None = None) -> Trained:
    model = case.build()
    loss, clip = loss_of(case), CONFIG["clip_grad_norm"]
    made = lambda params: Plain(model)  # noqa: E731
    return train_module(model, loss, steps, num_data=num_data, own=own, optimizer=made, clip=clip, keep=())


def equals_torch(stage: int, parallel: Mapping[str, Any], tolerance: float) -> None:
    case = tiny("llama")
    config = {**CONFIG, "zero": {"stage": stage}, "parallel": parallel}
    with quiet("rank"), partita.initialize(case.build(), config, loss_fn=case.loss_of_batch) as engine:
        data = engine.mesh.coordinate("data")
        expected = plain(case, steps=STEPS, num_data=engine.mesh.size("data"), own=data)
        if engine.mesh.size("pipeline") > 1:
            found = Trained()
            for step in range(STEPS):
                engine.train_batch(iter([case.batch(4, 1000 * step + data)]))
                found.norms.append(engine.last_step.grad_norm)
            found.weights = whole_weights(engine)
        else:
            found = train_engine(engine, loss_of(case), STEPS, data=data, keep=())
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    for name, weights in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weights, rtol=0, atol=tolerance * weights.abs().max().item())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_torch_on_one_process(num_ranks: int) -> None:
    on_ranks(num_ranks, equals_torch, 3 if num_ranks > 1 else 0, {}, 1e-5)


AXES = {
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "sequence": (2, {"sequence": 2}),
    "tensor x data": (4, {"tensor": 2}),
    "pipeline x data": (4, {"pipeline": 2}),
    "sequence x data": (4, {"sequence": 2}),
    "tensor x pipeline": (4, {"tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("axes", sampled(AXES, "tensor", "pipeline", "sequence", "tensor x data"))
def test_equals_torch_under_every_axis(axes: str, stage: int) -> None:
    num_ranks, parallel = AXES[axes]
    on_ranks(num_ranks, equals_torch, stage, parallel, 1e-4)
