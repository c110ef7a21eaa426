"""Lightning's Trainer on partita trains as on Lightning's own DDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from partita import ConfigError
from partita.integrations.lightning import PartitaStrategy
from tests.integrations.lightning.modules import (
    NOISE,
    STAGES,
    Manual,
    OfTheConfig,
    Plateau,
    Regression,
    loader,
    on_ddp,
    on_partita,
    quietly,
    trainer,
    worst,
)
from tests.kit.ranks import on_ranks

pytestmark = [pytest.mark.filterwarnings(noise) for noise in NOISE]

SAME = 1e-6  # relative difference from DDP's losses
ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


def fitted(kind: type[Regression], strategy: Any, **arguments: Any) -> dict[str, Any]:
    """Fit a module; return its losses, learning rates and number of steps."""
    module = kind()
    made = trainer(strategy, dist.get_world_size(), **arguments)
    made.fit(module, loader(), loader())
    if isinstance(strategy, PartitaStrategy):
        strategy.engine.close()
    held_out = float(made.callback_metrics["held_out"])
    return {"losses": [*module.losses, held_out], "rates": module.rates, "steps": made.global_step}


@quietly()
def beside_ddp(kind: type[Regression], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a fit under DDP, then those of each stage."""
    return [fitted(kind, on_ddp(), **arguments)] + [fitted(kind, on_partita(s), **arguments) for s in STAGES]


FITS = {
    "accumulated, clipped": (Regression, ACCUMULATED),
    "manual": (Manual, {}),
    "on a plateau": (Plateau, {"max_epochs": 3}),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", FITS)
def test_losses_and_rates_are_those_of_ddp(case: str, world: int) -> None:
    kind, arguments = FITS[case]
    for of_rank in on_ranks(world, beside_ddp, kind, arguments):
        ddp, *stages = of_rank
        assert len(set(ddp["rates"])) > 1
        for found in stages:
            assert worst(found["losses"], ddp["losses"]) <= SAME
            assert found["rates"] == ddp["rates"]
            assert found["steps"] == ddp["steps"]
        assert stages[0]["losses"] == stages[1]["losses"]  # these accumulate before the reduction, 2 and 3 after it
        assert stages[2]["losses"] == stages[3]["losses"]


@quietly()
def on_tensor_ranks(size: int) -> dict[str, Any]:
    return fitted(Regression, on_partita(1, parallel={"tensor": size}) if size > 1 else on_ddp(), **ACCUMULATED)


def test_ranks_that_share_a_model_are_fed_the_same_samples() -> None:
    ddp = on_ranks(2, on_tensor_ranks, 1)
    for rank, found in enumerate(on_ranks(4, on_tensor_ranks, 2, timeout=240)):
        beside = ddp[rank // 2]
        assert worst(found["losses"], beside["losses"]) <= 10 * SAME
        assert (found["rates"], found["steps"]) == (beside["rates"], beside["steps"])


@quietly()
def of_a_pipeline() -> str:
    try:
        fitted(Regression, on_partita(1, parallel={"pipeline": 2}))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_pipeline_is_not_fed_by_lightnings_loop() -> None:
    for said in on_ranks(2, of_a_pipeline):
        assert "parallel.pipeline: 2 under Lightning's Trainer, which calls forward and backward itself" in said


@quietly()
def in_16_bits() -> dict[str, list[float]]:
    module_of = {"ddp": on_ddp(), "autocast": on_partita(3, precision={"compute": "fp32"})}
    cast = {f"cast {stage}": on_partita(stage) for stage in (0, 3)}
    return {
        name: fitted(Regression, strategy, precision="bf16-mixed")["losses"]
        for name, strategy in {**module_of, **cast}.items()
    }


def test_bf16_mixed_casts_or_autocasts() -> None:
    for found in on_ranks(2, in_16_bits):
        assert worst(found["autocast"], found["ddp"]) <= SAME
        assert found["cast 0"] == found["cast 3"]
        assert 0 < worst(found["cast 3"], found["ddp"]) < 0.1


@quietly()
def fit_by_the_config() -> tuple[list[float], list[float]]:
    optimizer = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
    strategy = on_partita(3, optimizer=optimizer, schedule={"name": "linear", "warmup_steps": 2, "total_steps": 20})
    found = fitted(OfTheConfig, strategy)
    return found["losses"], found["rates"]


def test_without_configure_optimizers_they_are_the_configs() -> None:
    losses, rates = on_ranks(2, fit_by_the_config)[0]
    assert losses[-1] < 0.7 * losses[0]
    assert rates[0] == pytest.approx(2 / 3 * 1e-2)
    assert rates[2] < rates[1] == 1e-2


class Shifted(Regression):
    """A regression with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((1,), 0.1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return super().loss([batch[0] + self.shift, batch[1]])


Fitted = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


@quietly()
def after_validation(stage: int, precision: Any, validates: bool) -> Fitted:
    """Fit a module, maybe after a validation of it, and release it. Return the losses, the engine's weights at the end
    of the fit, and the state dict of the released module.
    """
    strategy, module = on_partita(stage), Shifted()
    made = trainer(strategy, dist.get_world_size(), max_epochs=1, precision=precision)
    if validates:
        made.validate(module, loader(), verbose=False)
    made.fit(module, loader())
    at_end = {name: value for name, value in strategy.engine.state_dict().items() if name != "shift"}
    strategy._end()
    return module.losses, at_end, module.state_dict()


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16-mixed"), (3, "bf16-true"), (2, "16-mixed")])
def test_a_module_keeps_its_weights_from_one_engine_to_the_next(stage: int, precision: str) -> None:
    alone = on_ranks(2, after_validation, stage, precision, False)
    validated = on_ranks(2, after_validation, stage, precision, True)
    expected = alone[0][1]
    assert any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())
    for (losses, _, released), (found, at_end, found_released) in zip(alone, validated, strict=True):
        assert found == losses
        for values in filter(None, (released, at_end, found_released)):
            assert {value.dtype for value in values.values()} == {torch.float32}
            assert all(torch.equal(values[name], value) for name, value in expected.items())


class OnMeta(Regression):
    """A module whose network is built on the meta device in ``configure_model``."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        with self.trainer.init_module(empty_init=True):
            self.net = Regression().net
        assert all(param.is_meta for param in self.net.parameters())


@quietly()
def on_meta() -> tuple[list[float], list[float]]:
    return fitted(Regression, on_ddp())["losses"], fitted(OnMeta, on_partita(3))["losses"]


def test_configure_model_on_meta() -> None:
    for ddp, found in on_ranks(2, on_meta):
        assert worst(found, ddp) <= SAME


@quietly()
def evaluated_alone(stage: int) -> tuple[float, float, float, bool]:
    """Test without a fit. Return DDP's loss, partita's loss, 1.0 if the engine planned memory for parameters only, and
    True if all parameters still require gradients. Also check the Trainer's predictions.
    """
    module, made = Regression(), trainer(on_ddp(), dist.get_world_size())
    (expected,) = made.test(module, loader(), verbose=False)
    strategy = on_partita(stage)
    made = trainer(strategy, dist.get_world_size())
    (found,) = made.test(module, loader(), verbose=False)
    states = {state for state, _ in strategy.engine.planned_bytes}
    predicted = made.predict(module, loader())
    trains = all(param.requires_grad for param in module.parameters())
    strategy.engine.close(whole=True)
    assert predicted is not None
    assert torch.equal(torch.cat(predicted), torch.cat([module(x) for x, _ in _own(made)]))
    return expected["tested"], found["tested"], float(states == {"parameters"}), trains


def _own(made: Any) -> Any:
    """Return the batches that this rank predicts."""
    return made.predict_dataloaders


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_alone_holds_no_optimizer_states(stage: int) -> None:
    for expected, found, only_parameters, trains in on_ranks(2, evaluated_alone, stage):
        assert found == pytest.approx(expected, rel=SAME)
        assert only_parameters
        assert trains


@quietly()
def fit_twice() -> tuple[list[float], list[float], float, float]:
    """Fit, test and fit again with one Trainer and module, under DDP and on partita; return losses and test losses."""
    found = []
    for strategy in (on_ddp(), on_partita(3)):
        module = Regression()
        made = trainer(strategy, dist.get_world_size(), max_epochs=1)
        made.fit(module, loader())
        tested = made.test(module, loader(), verbose=False)[0]["tested"]
        made.fit_loop.max_epochs = 2
        made.fit(module, loader())
        found.append((module.losses, tested))
    assert isinstance(strategy, PartitaStrategy)
    strategy.engine.close()
    (ddp, ddp_tested), (own, own_tested) = found
    return ddp, own, ddp_tested, own_tested


def test_a_trained_module_is_tested_and_fitted_again() -> None:
    for ddp, own, ddp_tested, own_tested in on_ranks(2, fit_twice):
        assert worst(own, ddp) <= SAME
        assert own_tested == pytest.approx(ddp_tested, rel=SAME)
