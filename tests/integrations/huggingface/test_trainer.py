"""A Trainer's losses, norms and learning rates on partita: those of the plain Trainer, and the same at every stage."""

from typing import Any

import pytest

from tests.integrations.huggingface.runs import Run, histories
from tests.local import pool

Rows = list[dict[str, float]]
STAGES = (0, 1, 2, 3)


def at(stage: int, **config: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage}, **config}


def assert_close(rows: Rows, expected: Rows, relative: float = 1e-6) -> None:
    assert len(rows) == len(expected) > 0
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=relative), f"step {row['step']}"


def on(world: int, *runs: Run) -> list[Rows]:
    """The histories of the runs, which are the same on every rank."""
    every = pool.run(world, histories, list(runs), timeout=120)
    for other in every[1:]:
        assert [[row["loss"] for row in rows if "loss" in row] for rows in other] == [
            [row["loss"] for row in rows if "loss" in row] for rows in every[0]
        ]
    return every[0]


ARGUMENTS: dict[str, dict[str, Any]] = {
    "accumulation, a short last batch, evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "tokens averaged per rank": {"average_tokens_across_devices": False},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "no clipping, no accumulation": {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1},
}
SAMPLE = next(iter(ARGUMENTS))


@pytest.mark.parametrize("world", [1, 2])
def test_as_the_plain_trainer(world: int) -> None:
    arguments = ARGUMENTS[SAMPLE]
    plain, *others = on(world, Run(None, arguments), *(Run(at(stage), arguments) for stage in STAGES))
    for rows in others:
        assert_close(rows, plain)
    assert others[0] == others[1]
    assert others[2] == others[3]
