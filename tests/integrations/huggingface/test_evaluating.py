"""Evaluation, prediction and their errors under a Trainer on partita."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from partita import ConfigError
from tests.integrations.huggingface.runs import Run, alone, end, llama, losses_of, samples, scratch, trainer_of
from tests.kit.ranks import on_ranks


def looked_at(run: Run, first: bool) -> tuple[dict[str, float], Any, list[float]]:
    """Train and evaluate; with ``first``, evaluate and predict before it, too."""
    with alone(), scratch() as folder:
        trainer = trainer_of(run, folder)
        found, predicted = dict[str, float](), None
        try:
            if first:
                found["before"] = trainer.evaluate()["eval_loss"]
                predicted = trainer.predict(samples(3, 4)).predictions
            if not (first and run.is_plain):  # the plain Trainer does not wrap a model in DDP that it has evaluated
                trainer.train()
                found["after"] = trainer.evaluate()["eval_loss"]
            return found, predicted, losses_of(trainer)
        finally:
            end(trainer)


def several(run: Run) -> list[Any]:
    return [looked_at(Run(), True), looked_at(Run(), False), looked_at(run, True)]


def test_evaluation_before_and_after_training() -> None:
    run = Run({"zero": {"stage": 3}})
    (before, logits, _), (after, _, losses), (found, found_logits, found_losses) = on_ranks(
        2, several, run, timeout=120
    )[0]
    assert found == pytest.approx(before | after, rel=1e-6)
    assert np.allclose(found_logits, logits, atol=1e-6)
    assert found_losses == pytest.approx(losses, rel=1e-6)


class Stop(TrainerCallback):  # type: ignore[misc]
    """Callback that stops training after step 2."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 2


def trained_twice() -> list[float]:
    """Stop a run after two steps, then train again with the same trainer; return the losses of both runs."""
    with alone(), scratch() as folder:
        trainer = trainer_of(Run({"zero": {"stage": 2}}), folder, callbacks=[Stop()])
        try:
            trainer.train()
            stopped = losses_of(trainer)
            trainer.remove_callback(Stop)
            trainer.train()
            return stopped + losses_of(trainer)
        finally:
            end(trainer)


def test_a_trainer_that_trains_twice() -> None:
    """A trainer that was stopped trains again for all steps, from the weights that it has."""
    losses = on_ranks(2, trained_twice, timeout=120)[0]
    assert len(losses) == 2 + 6
    assert losses[2] < losses[0]  # on the same samples


def refused(run: Run) -> str:
    with alone(), scratch() as folder:
        trainer = None
        try:
            trainer = trainer_of(run, folder)
            trainer.train()
        except ConfigError as error:
            return str(error)
        finally:
            if trainer is not None:
                end(trainer)
    return ""


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ({"zero": {"stage": 3}}, {"auto_find_batch_size": True}, "auto_find_batch_size with sharded parameters"),
        ({"clip_grad_norm": 0.5}, {}, "clip_grad_norm and max_grad_norm differ"),
        ({"precision": {"gradients": "in_backward"}}, {}, "precision.gradients: in_backward"),
    ],
)
def test_what_does_not_go_together(config: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    for text in on_ranks(2, refused, Run(config, arguments)):
        assert said in text


def test_the_learning_rate_may_follow_a_metric(tmp_path: Path) -> None:
    """ReduceLROnPlateau gives the learning rates of the plain Trainer, because it gets the loss of all ranks."""
    arguments = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1e3},
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "warmup_steps": 0,
    }
    plain, found = on_ranks(2, rates, Run(None, arguments), Run({"zero": {"stage": 3}}, arguments), timeout=120)[0]
    assert found == plain
    assert plain[-1] < plain[0]


def rates(*runs: Run) -> list[list[float]]:
    found = []
    for run in runs:
        with alone(), scratch() as folder:
            trainer = trainer_of(run, folder)
            trainer.train()
            found.append([row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row])
            end(trainer)
    return found


def with_own_optimizer(folder: Path) -> list[float]:
    """Return the learning rates of a run with a given optimizer; the arguments' learning rate is unused."""
    with alone():
        model = llama()
        run = Run({"zero": {"stage": 2}, "optimizer": {"lr": 0.5}})
        trainer = trainer_of(run, folder, model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None))
        try:
            trainer.train()
            return [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
        finally:
            end(trainer)


def test_an_optimizer_that_is_given(tmp_path: Path) -> None:
    rates = on_ranks(2, with_own_optimizer, tmp_path)[0]
    assert max(rates) == 0.5
