"""Low-rank sums of gradients: those of PowerSGD, with the same bits at every stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.compression.low_rank import LowRankSync, Matrix
from partita.config.resolve import resolve
from partita.kernels.low_rank import left_factor, orthogonal, product, right_factor
from tests.compression.test_feedback import syncs
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, assert_same_bits, rank, train_recipe, whole_weights, world

RANK, STEPS = 2, 6
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
CONFIG: dict[str, Any] = {"optimizer": ADAMW, "communication": {"gradients": "low_rank", "low_rank": RANK}}


def reference(starts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Train plain PyTorch on all ranks' samples: AdamW on low-rank means of matrices and full means of vectors."""
    model, num = Recipe(lambda: Stack(2)).built(), world()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    held = [{name: torch.zeros_like(p) for name, p in model.named_parameters()} for _ in range(num)]
    rights = {name: start.clone() for name, start in starts.items()}
    for step in range(STEPS):
        fed = list[dict[str, Tensor]]()
        for other in range(num):
            optimizer.zero_grad()
            square_loss(model, other, step).backward()
            fed.append({name: p.grad / num + held[other][name] for name, p in model.named_parameters()})
        for name, param in model.named_parameters():
            every = [of_rank[name] for of_rank in fed]
            if name not in starts:
                param.grad = torch.stack(every).sum(0)
                continue
            left = orthogonal(torch.stack([left_factor(m, rights[name]) for m in every]).sum(0))
            rights[name] = torch.stack([right_factor(m, left) for m in every]).sum(0)
            param.grad = product(left, rights[name])
            for of_rank, mine in zip(held, every, strict=True):
                of_rank[name] = mine - param.grad / num
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def starts(engine: partita.Engine) -> dict[str, Tensor]:
    """Return the initial right factor of each matrix."""
    every = [sync.factors for sync in syncs(engine) if isinstance(sync, LowRankSync)]
    return {member.fqn: f._start(member, matrix) for f in every for member, matrix in f._matrices}


def follows() -> None:
    with partita.initialize(Recipe(lambda: Stack(2)).built(), CONFIG | {"zero": ZERO["2"]}) as engine:
        expected = reference(starts(engine))
        assert len(starts(engine)) == 6
        for step in range(STEPS):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        for name, weight in whole_weights(engine).items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def every_stage() -> list[float]:
    runs = [
        train_recipe(Recipe(lambda: Stack(2), config=CONFIG | {"clip_grad_norm": 0.1}, num_steps=STEPS), ZERO[plan])
        for plan in ("0", "1", "2", "3")
    ]
    for run in runs[1:]:
        assert_same_bits(run, runs[0], "low rank")
    return runs[0].losses


def resumed(folder: Path, plan: str) -> None:
    config = CONFIG | {"zero": ZERO[plan]}

    def go(engine: partita.Engine, first: int, stop: int) -> None:
        for step in range(first, stop):
            engine.backward(square_loss(engine, rank(), step))
            engine.step()

    with partita.initialize(Recipe(lambda: Stack(2)).built(), config) as engine:
        go(engine, 0, 3)
        engine.save(folder)
        go(engine, 3, STEPS)
        continued = whole_weights(engine)
    with partita.initialize(Stack(2), config) as engine:
        engine.load(folder)
        go(engine, 3, STEPS)
        for name, weight in whole_weights(engine).items():
            assert torch.equal(weight, continued[name]), name


def left_out() -> None:
    """Check that a non-finite step leaves factors and residuals unchanged."""
    runs = []
    for bad in (None, 2):
        with partita.initialize(Recipe(lambda: Stack(2)).built(), CONFIG | {"zero": ZERO["1"]}) as engine:
            for step in range(4):
                if step == bad:
                    engine.backward(square_loss(engine, rank(), step) * float("inf" if rank() == 1 else 1.0))
                    with pytest.warns(UserWarning, match="the update is skipped"):
                        assert engine.step().skipped
                engine.backward(square_loss(engine, rank(), step))
                engine.step()
            runs.append(whole_weights(engine))
    assert all(torch.equal(weight, runs[1][name]) for name, weight in runs[0].items())


def test_it_is_power_sgd() -> None:
    on_ranks(2, follows)


def test_every_stage_has_the_same_bits() -> None:
    losses, *_ = on_ranks(2, every_stage)
    half = len(losses) // 2
    assert sum(losses[-half:]) < sum(losses[:half])


@pytest.mark.parametrize("plan", ["0", "3"])
def test_a_resumed_run_is_the_continued_one(tmp_path: Path, plan: str) -> None:
    on_ranks(2, resumed, tmp_path, plan)


def test_a_step_that_is_left_out_changes_nothing() -> None:
    on_ranks(2, left_out)


@pytest.mark.parametrize(
    ("shape", "columns"), [((40, 24), 2), ((40, 4, 6), 2), ((2, 2), 0), ((7,), 0), ((), 0), ((3, 0), 0)]
)
def test_what_has_factors(shape: tuple[int, ...], columns: int) -> None:
    matrix = Matrix.of(shape)
    assert matrix.factor_columns(RANK) == columns


@pytest.mark.parametrize("other", [{"communication": {"every": 2}}, {"optimizer": {"name": "onebit_adam"}}], ids=str)
def test_what_has_no_whole_matrices(other: dict[str, dict[str, Any]]) -> None:
    sections = {"communication": {"gradients": "low_rank", "warmup_steps": 1} | other.get("communication", {})}
    with pytest.raises(partita.ConfigError, match="low_rank needs full matrices"):
        resolve(partita.Config(**(other | sections)), 4, "cpu")
