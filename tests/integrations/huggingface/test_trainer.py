"""Losses, norms and learning rates of a Trainer on partita: those of the plain Trainer, and the same at every stage."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from partita import ConfigError
from partita.config import deepspeed
from tests.integrations.huggingface.runs import Run, alone, end, histories, model_of, rows_of, scratch, trainer_of
from tests.kit.ranks import on_ranks

LEARNING_RATES = Path(__file__).parents[2] / "config" / "deepspeed" / "learning_rates.json"
Rows = list[dict[str, float]]
STAGES = (0, 1, 2, 3)


def at(stage: int, **config: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage}, **config}


def assert_close(rows: Rows, expected: Rows, relative: float = 1e-6) -> None:
    assert len(rows) == len(expected) > 0
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=relative), f"step {row['step']}"


def on(world: int, *runs: Run) -> list[Rows]:
    """Return the logs of the runs on rank 0; check that the losses are the same on every rank."""
    every = on_ranks(world, histories, list(runs), timeout=120)
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


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_as_the_plain_trainer(world: int) -> None:
    arguments = ARGUMENTS[SAMPLE]
    plain, *others = on(world, Run(None, arguments), *(Run(at(stage), arguments) for stage in STAGES))
    for rows in others:
        assert_close(rows, plain)
    assert others[0] == others[1]
    assert others[2] == others[3]


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != SAMPLE])
def test_every_argument_as_the_plain_trainer(name: str, world: int) -> None:
    arguments = ARGUMENTS[name]
    plain, *others = on(world, Run(None, arguments), *(Run(at(stage), arguments) for stage in STAGES))
    for rows in others:
        assert_close(rows, plain)
    assert others[0] == others[1]
    assert others[2] == others[3]


def test_an_optimizer_that_needs_full_parameters() -> None:
    arguments = {"optim": "adafactor"}
    plain, *others = on(2, Run(None, arguments), *(Run(at(stage), arguments) for stage in (0, 1, 3)))
    for rows in others:
        assert_close(rows, plain)
    assert others[0] == others[1]


def test_arguments_in_a_sample() -> None:
    """Every argument gives the plain Trainer's numbers at stage 3; the thorough tests cover all stages."""
    names = [name for name in ARGUMENTS if name != SAMPLE]
    runs = [Run(config, ARGUMENTS[name]) for name in names for config in (None, at(3))]
    found = on(2, *runs)
    for plain, rows in zip(found[::2], found[1::2], strict=True):
        assert_close(rows, plain)


BF16 = {"bf16": True}
AUTOCAST = {"precision": {"compute": "fp32"}}


def test_bf16_casts_or_autocasts() -> None:
    """Autocast has the plain Trainer's numbers; casts have the same numbers at every stage.

    Norms that are summed in another order differ in the last bit. Rounding to bf16 occasionally turns this into 2 ** -8
    of a weight.
    """
    for arguments, relative in ((BF16 | {"max_grad_norm": 0.0}, 1e-6), (BF16, 2**-10)):
        plain, *others = on(2, Run(None, arguments), *(Run(at(stage, **AUTOCAST), arguments) for stage in (1, 3)))
        for rows in others:
            assert_close(rows, plain, relative)
    unaccumulated = BF16 | {"gradient_accumulation_steps": 1}
    first, *others = on(2, *(Run(at(stage), unaccumulated) for stage in STAGES))
    assert all(rows == first for rows in others)
    assert first != plain


@pytest.mark.thorough
def test_bf16_without_clipping() -> None:
    """On one rank, autocast has the plain Trainer's numbers if no norm, whose errors bf16 amplifies, affects them."""
    arguments = BF16 | {"max_grad_norm": 0.0}
    plain, *others = on(1, Run(None, arguments), *(Run(at(stage, **AUTOCAST), arguments) for stage in (1, 3)))
    for rows in others:
        assert_close(rows, plain)


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip as torch does, but by an exact norm: torch sums squares in fp32, with errors of 1e-6 and more."""
    gradients = [param.grad for param in parameters if param.grad is not None]
    norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().float()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def exactly_clipped(run: Run) -> Rows:
    with mock.patch.object(torch.nn.utils, "clip_grad_norm_", clip):
        return histories([run])[0]


@pytest.mark.thorough
def test_bf16_on_one_rank() -> None:
    """Autocast has the numbers of a plain Trainer with an exact norm: bf16 amplifies errors in a norm's last bits."""
    (plain,) = on_ranks(1, exactly_clipped, Run(None, BF16), timeout=120)
    others = on(1, *(Run(at(stage, **AUTOCAST), BF16) for stage in STAGES))
    for rows in others:
        assert_close(rows, plain)
    first, *others = on(1, *(Run(at(stage), BF16) for stage in STAGES))
    assert all(rows == first for rows in others)


def test_adapters_and_tied_weights() -> None:
    runs = [Run(config, lora=lora, tied=not lora) for lora in (False, True) for config in (None, at(3))]
    tied, tied_at_3, lora, lora_at_3 = on(2, *runs)
    assert_close(tied_at_3, tied)
    assert_close(lora_at_3, lora)


def one_after_the_other(runs: list[Run]) -> Rows:
    """Train one model with several Trainers in turn; return what they log."""
    with alone(), scratch() as folder:
        model, rows, trainer = model_of(runs[0]), [], None
        for run in runs:
            trainer = trainer_of(run, folder, model=model)
            trainer.train()
            rows += rows_of(trainer)
        if hasattr(model, "generate"):
            model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2)
        end(trainer)
        return rows


def test_a_model_goes_from_one_trainer_to_the_next() -> None:
    plain = on_ranks(2, one_after_the_other, [Run(), Run()], timeout=120)[0]
    assert_close(on_ranks(2, one_after_the_other, [Run(at(3)), Run(at(1))], timeout=120)[0], plain)
    with pytest.raises(ConfigError, match=r"in torch.bfloat16 with master weights \('.*' was torch.float32\)"):
        on_ranks(2, one_after_the_other, [Run(at(3), BF16 | {"max_steps": 1})] * 2, timeout=120)


def trained_again(run: Run) -> Rows:
    """Train with ``auto_find_batch_size``, which starts again after the first backward has run out of memory."""
    errors = [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")]

    def fail_once(gradient: Tensor) -> None:
        if errors:
            raise errors.pop()

    def watch(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail_once)

    with alone(), scratch() as folder:
        model: Any = model_of(run)
        model.model.embed_tokens.register_forward_hook(watch)  # its gradient comes last
        trainer = trainer_of(run, folder, model=model)
        trainer.train()
        assert not errors
        end(trainer)
        return rows_of(trainer)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_batch_that_an_error_has_ended_leaves_no_gradients(stage: int) -> None:
    arguments = BF16 | {"lr_scheduler_type": "constant", "warmup_steps": 0, "num_train_epochs": 1}
    (expected,) = on(1, Run(at(stage), arguments | {"per_device_train_batch_size": 1}))
    (found,) = on_ranks(1, trained_again, Run(at(stage), arguments | {"auto_find_batch_size": True}), timeout=120)
    assert len(found) > 4
    assert found == expected


class FailOnce(TrainerCallback):
    """A callback that fails once, between clipping and the optimizer's step."""

    def __init__(self) -> None:
        self.errors = [KeyError("the user's")]

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if self.errors:
            raise self.errors.pop()


def steps_after_an_error(run: Run) -> int:
    """Train again after an error between clipping and the step; return the engine's steps in the second training."""
    with alone(), scratch() as folder:
        trainer: Any = trainer_of(run, folder, callbacks=[FailOnce()])
        with pytest.raises(KeyError, match="the user's"):
            trainer.train()
        engine = trainer.accelerator.engines.of(trainer.model).engine
        before: int = engine.global_step
        trainer.train()
        end(trainer)
        return int(engine.global_step) - before


@pytest.mark.parametrize("gradients", ["fp32", "in_backward"])
def test_a_step_that_an_error_has_prevented_is_not_made_later(gradients: str) -> None:
    arguments = {"gradient_accumulation_steps": 1, "max_grad_norm": 1000.0, "max_steps": 3}
    run = Run(at(1, precision={"gradients": gradients}), arguments)
    assert on_ranks(1, steps_after_an_error, run) == [3]


def test_units_that_are_updated_in_backward() -> None:
    """Updates in backward, which clip by unit, have the plain losses if nothing is clipped."""
    arguments = {"gradient_accumulation_steps": 1, "max_grad_norm": 1000.0}
    config = at(3, precision={"gradients": "in_backward"})
    plain, rows = on(2, Run(None, arguments), Run(config, arguments))
    assert_close(rows, plain)


def test_a_schedule_of_deepspeeds_that_is_written_out() -> None:
    """The learning rates are those of DeepSpeed's own class (``tests/config/test_deepspeed.py`` gives their source)."""
    known = json.loads(LEARNING_RATES.read_text())
    wanted = next(one for one in known if one["scheduler"]["type"] == "WarmupDecayLR" and one["lr"] != 1e-3)
    config = {"zero_optimization": {"stage": 2}, "scheduler": wanted["scheduler"]}
    settings = deepspeed.read(config, 1, arguments={}).settings
    silent = {"lr_scheduler_type": "linear", "warmup_steps": 0, "learning_rate": 5e-5, "logging_strategy": "steps"}
    (rows,) = on(1, Run(settings, silent))
    rates = [row["learning_rate"] for row in rows if "learning_rate" in row]
    assert len(rates) == 6
    assert rates == pytest.approx(wanted["rates"][:6], abs=1e-12)


class Lines(logging.Handler):
    """Handler that collects the lines that partita logs."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.found += record.getMessage().splitlines()


def lines_of(run: Run, scheduled: bool) -> list[str]:
    """Return the lines that a training run logs, with or without a scheduler from the script."""
    lines, logger = Lines(), logging.getLogger("partita")
    with alone(), scratch() as folder:
        model = model_of(run)
        optimizer = torch.optim.AdamW(model.parameters())
        given = {"optimizers": (optimizer, LambdaLR(optimizer, lambda step: 1.0))} if scheduled else {}
        trainer = trainer_of(run, folder, model=model, **given)
        logger.addHandler(lines)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            trainer.train()
        finally:
            logger.removeHandler(lines)
            logger.setLevel(level)
            end(trainer)
    return lines.found


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_schedule_is_said_to_be_ignored_only_where_it_is(scheduled: bool) -> None:
    config = at(1, schedule={"name": "cosine", "warmup_steps": 1, "total_steps": 2})
    arguments = {"lr_scheduler_type": "linear", "warmup_steps": 0, "learning_rate": 5e-5, "num_train_epochs": 1}
    (lines,) = on_ranks(1, lines_of, Run(config, arguments), scheduled, timeout=120)
    assert any(line.startswith("optimizer: ") for line in lines)
    assert any(line.startswith("ignored: schedule") for line in lines) == scheduled
