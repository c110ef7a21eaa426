"""Settings that both Lightning and the config can give: they are combined, or refused if they contradict."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

import partita
from partita import ConfigError, PartitaError
from partita.config.load import load_config
from partita.integrations.lightning import PartitaStrategy, settings
from tests.integrations.lightning.modules import NOISE, OfTheConfig, Regression, loader, on_partita, quietly, trainer
from tests.kit.ranks import on_ranks

pytestmark = [pytest.mark.filterwarnings(noise) for noise in NOISE]

PRECISIONS = {
    # (Lightning's precision, the config's): (dtype of computation, True if under autocast)
    ("32-true", "auto"): ("fp32", False),
    ("32-true", "bf16"): ("bf16", False),  # Lightning's default does not contradict the config
    ("bf16-mixed", "auto"): ("bf16", False),
    ("bf16-mixed", "bf16"): ("bf16", False),
    ("bf16-mixed", "fp32"): ("fp32", True),
    ("bf16-true", "auto"): ("bf16", False),
    ("16-mixed", "auto"): ("fp16", False),
    ("16-true", "fp16"): ("fp16", False),
}
CONTRADICTIONS = [("bf16-mixed", "fp16"), ("bf16-true", "fp32"), ("16-mixed", "fp32"), ("16-mixed", "bf16")]


@pytest.mark.parametrize(("lightning", "compute"), PRECISIONS)
def test_precision_follows_from_both(lightning: str, compute: str) -> None:
    config, autocasts = settings.with_precision(load_config({"precision": {"compute": compute}}), lightning)
    assert (config.precision.compute, autocasts) == PRECISIONS[lightning, compute]


@pytest.mark.parametrize(("lightning", "compute"), CONTRADICTIONS)
def test_contradicting_precisions_are_both_shown(lightning: str, compute: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)precision.compute is {compute}, but .*{lightning}.*Fix: leave"):
        settings.with_precision(load_config({"precision": {"compute": compute}}), lightning)


@pytest.mark.parametrize(
    ("lightning", "given", "expected"),
    [
        ("bf16-mixed", {}, ("mixed", "fp32")),
        ("16-mixed", {"mode": "autocast"}, ("autocast", "fp32")),
        ("bf16-true", {}, ("cast", "compute")),
        ("bf16-true", {"mode": "mixed"}, ("mixed", "fp32")),
    ],
)
def test_a_true_precision_casts_the_model(lightning: str, given: dict[str, str], expected: tuple[str, str]) -> None:
    precision = settings.with_precision(load_config({"precision": given}), lightning)[0].precision
    assert (precision.mode, precision.outputs) == expected


def test_an_unknown_precision() -> None:
    with pytest.raises(ConfigError, match="precision='64-true': expected one of '32-true'"):
        settings.with_precision(load_config(None), "64-true")


LEFT_TO_LIGHTNING = {
    "checkpoint.dir and checkpoint.every_steps: .*ModelCheckpoint": {"checkpoint": {"dir": "x"}},
    "nonfinite: rewind loads a checkpoint": {"precision": {"nonfinite": "rewind"}, "checkpoint": {}},
}


@pytest.mark.parametrize("said", LEFT_TO_LIGHTNING)
def test_what_lightning_does_itself(said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PartitaStrategy(LEFT_TO_LIGHTNING[said])


class TwoOptimizers(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(params, lr=0.1) for params in (self.net.parameters(), [self.bias])]


class OwnBackward(Regression):
    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


CLIP = {"gradient_clip_val": 0.5}
REFUSED: dict[str, tuple[type[Regression], dict[str, Any], dict[str, Any]]] = {
    "configure_optimizers returned 2 optimizers; PartitaStrategy trains with one": (TwoOptimizers, {}, {}),
    "gradient_clip_algorithm='value'": (Regression, {}, {**CLIP, "gradient_clip_algorithm": "value"}),
    r"clip_grad_norm is 1, but the Trainer's gradient_clip_val is 0.5": (Regression, {"clip_grad_norm": 1.0}, CLIP),
    r"batch.accumulate is 4, but accumulate_grad_batches is 2": (
        Regression,
        {"batch": {"accumulate": 4}},
        {"accumulate_grad_batches": 2},
    ),
    r"schedule: the config has one \(constant\), and Lightning steps the optimizer's own scheduler": (
        Regression,
        {"schedule": {"warmup_steps": 3}},
        {},
    ),
    "would miss the loss scale of fp16": (OwnBackward, {"precision": {"compute": "fp16"}}, {}),
}


@quietly()
def fit_refused(said: str) -> None:
    kind, config, arguments = REFUSED[said]
    with pytest.raises(PartitaError, match=said):
        trainer(on_partita(1, **config), 1, **arguments).fit(kind(), loader())


@pytest.mark.parametrize("said", REFUSED)
def test_what_fit_refuses(said: str) -> None:
    on_ranks(1, fit_refused, said)


@quietly()
def fit_with_both() -> tuple[list[float], list[float]]:
    """Return the losses of a module with its own backward, whose config repeats the Trainer's values, and those of a
    module with neither.
    """
    found = []
    for kind, config in ((OwnBackward, {"clip_grad_norm": 0.5, "batch": {"accumulate": 2}}), (Regression, {})):
        strategy, module = on_partita(2, **config), kind()
        trainer(strategy, 1, accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=1).fit(module, loader())
        strategy.engine.close()
        found.append(module.losses)
    return found[0], found[1]


def test_equal_values_in_both_places_and_an_own_backward() -> None:
    ((own, plain),) = on_ranks(1, fit_with_both)
    assert own == plain


class Fails(OfTheConfig):
    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == 1:
            raise KeyError("the user's")
        return super().training_step(batch, number)


@quietly()
def fit_that_fails() -> None:
    strategy, module = on_partita(3), Fails()
    with pytest.raises(PartitaError, match="PartitaStrategy has no engine yet: the Trainer creates it in fit"):
        strategy.engine  # noqa: B018
    with pytest.raises(KeyError, match="the user's"):
        trainer(strategy, 1).fit(module, loader())
    with pytest.raises(PartitaError, match="no engine"):
        strategy.engine  # noqa: B018
    with partita.initialize(module) as engine:  # the failed fit has released the module
        assert engine.module is module


def test_an_exception_ends_the_engine() -> None:
    on_ranks(1, fit_that_fails)


@quietly()
def launched_by_lightning() -> None:
    """Fit without torchrun's environment, where Lightning starts processes itself; the single rank is this process."""
    strategy = PartitaStrategy({"zero": {"stage": 2}})
    made = Trainer(strategy=strategy, accelerator="cpu", devices=1, fast_dev_run=True, enable_progress_bar=False)
    made.fit(Regression(), loader())
    assert made.global_step == 1
    strategy.engine.close()


def test_lightnings_own_environment() -> None:
    on_ranks(1, launched_by_lightning)
