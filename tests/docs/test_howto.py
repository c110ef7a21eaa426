"""Tests that run the Python code of how-to pages on two ranks at stage 3, block after block."""

import contextlib
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import partita
from tests.kit.models import CASES
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
STAGE_3 = {"zero": {"stage": 3}, "optimizer": {"lr": 1e-2}}


def blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (HOWTO / name).read_text(), flags=re.DOTALL | re.MULTILINE)


def run(name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a page in a namespace with these names, and return the namespace."""
    for number, block in enumerate(blocks(name)):
        exec(compile(block, f"{name}, block {number}", "exec"), names)
    return names


def classifier() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    loader = [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(3)]
    return {"model": model, "loader": loader, "loss_fn": F.cross_entropy}


def with_optimizers() -> tuple[list[float], float]:
    """Return the weight decays of the optimizer's groups, and the norm returned by the page's clipping."""
    names = run("optimizers.md", classifier())
    with names["engine"] as engine:
        return [group["weight_decay"] for group in engine.optimizer.param_groups], names["norm"]


def test_optimizers() -> None:
    for decays, norm in on_ranks(2, with_optimizers):
        assert decays == [0.1, 0.0]
        assert norm > 0


def with_evaluation(folder: str) -> tuple[float, float, float, bool]:
    """Return the losses of the weights, of their average and of the best checkpoint, and True for a valid accuracy."""
    case = CASES["llama"]
    batches = case.batches(2, seed=rank())
    held_out = [next(batches) for _ in range(2)]
    given = {"loader": [*held_out, held_out[0]], "held_out": held_out, "math": math, "torch": torch}
    with contextlib.chdir(folder), partita.initialize(case.build(), STAGE_3) as engine:
        names = run("evaluation.md", {**given, "engine": engine, "prompt": held_out[0]["input_ids"][:1, :4]})
        loss = engine.eval_batch(held_out).item()
    return loss, names["averaged_loss"].item(), names["loss"], 0 <= names["accuracy"].item() <= 1


def test_evaluation(tmp_path: Path) -> None:
    for loss, averaged, best, is_share in on_ranks(2, with_evaluation, str(tmp_path), timeout=120):
        assert loss == best
        assert averaged > loss  # the average of three steps is near the start
        assert is_share
    assert (tmp_path / "weights-ema" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "best").glob("step-*")] == ["step-3"]


def on_a_cluster(folder: str) -> int:
    """Run the page's loop with a SIGTERM to rank 1 in the first step; return the number of completed steps."""

    def loss_and_signal(output: Tensor, labels: Tensor) -> Tensor:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(output, labels)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with partita.initialize(classifier()["model"], STAGE_3 | {"checkpoint": {"dir": folder}}) as engine:
            run("clusters.md", {**classifier(), "loss_fn": loss_and_signal, "engine": engine})
            return engine.global_step
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loop_that_is_stopped_saves_on_all_ranks(tmp_path: Path) -> None:
    assert on_ranks(2, on_a_cluster, str(tmp_path)) == [1, 1]
    assert (tmp_path / "step-1" / "manifest.json").exists()
