"""Exponential moving averages of the weights: equal to a plain reference on every mesh; checkpoints, and errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita import PartitaError
from partita.checkpoint.format.stored import open_stored
from partita.huggingface.export import export_checkpoint
from partita.huggingface.weights import Weights
from tests.kit import CASES, PLANS, on_ranks
from tests.kit.models import Stack, square_loss
from tests.kit.training import ADAMW, rank

DECAY = 0.75
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"zero": {"stage": 3}, "parallel": {"tensor": 2}},
    "pipeline": {"zero": {"stage": 1}, "parallel": {"pipeline": 2}, "batch": {"accumulate": 2}},
    "replicas": {"zero": {"stage": 3, "replicate": "nodes"}},
}


def started(config: dict[str, Any]) -> partita.Engine:
    case = CASES["llama"]
    return partita.initialize(case.build(), {"optimizer": ADAMW, **config}, loss_fn=case.loss_of_batch)


def train(engine: partita.Engine) -> None:
    data, num = engine.mesh.coordinate("data"), engine.config.batch.accumulate
    seeds = [1000 * engine.global_step + 100 * micro + data for micro in range(num if isinstance(num, int) else 1)]
    engine.train_batch([CASES["llama"].batch(2, seed) for seed in seeds])


def weights(engine: partita.Engine) -> dict[str, Tensor]:
    """Return the weights that the optimizer updates, in fp32; empty except on rank 0."""
    return {name: value.float() for name, value in engine.state_dict().items()}


def averaged(average: dict[str, Tensor], new: dict[str, Tensor], decay: float = DECAY) -> dict[str, Tensor]:
    return {name: average[name] * decay + new[name] * (1.0 - decay) for name in new}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert got.keys() == expected.keys()
    differ = [name for name in got if not torch.equal(got[name], expected[name])]
    assert not differ, f"{what}: {differ}"


def exact(config: dict[str, Any]) -> None:
    """Check that the average equals a plain reference, and that training has the bits of a run without it."""
    with started(config) as engine:
        for _ in range(3):
            train(engine)
        alone = weights(engine)
    with started(config) as engine:
        ema = engine.ema(DECAY)
        expected = weights(engine)
        for step in range(3):
            train(engine)
            own = weights(engine)
            expected = averaged(expected, own)
            for number in range(2):  # reading the average does not change it
                with ema.applied():
                    assert_equal(weights(engine), expected, f"average {number} after step {step}")
            assert_equal(weights(engine), own, f"weights after the average of step {step}")
        assert_equal(weights(engine), alone, "weights of the run without an average")
        for segment in (segment for unit in engine._parts.runtime.units for segment in unit.trained):
            (kept,) = ema.saved(segment).values()
            assert kept.shape == (segment.layout.shard_elements,), "an average is sharded"


@pytest.mark.parametrize("plan", ["0", "3"])
def test_one_rank(plan: str) -> None:
    on_ranks(1, exact, PLANS[plan])


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "3-recomputed"])
def test_stages_and_tiers(plan: str) -> None:
    on_ranks(2, exact, PLANS[plan])


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_axes(name: str) -> None:
    on_ranks(4, exact, PARALLEL[name])


def evaluated(config: dict[str, Any], folder: Path) -> float:
    """Check that evaluation and export read the applied average. Return the loss."""
    with started(config) as engine:
        ema = engine.ema(0.0)  # decay 0: the average equals the latest weights
        train(engine)
        batches = [CASES["llama"].batch(2, 7)]
        expected = engine.eval_batch(batches)
        slow = engine.ema(1.0, name="slow")  # decay 1: the average keeps its first weights
        own = weights(engine)
        train(engine)
        assert engine.eval_batch(batches) != expected
        with slow.applied():
            assert torch.equal(engine.eval_batch(batches), expected)
            engine.export(folder)
        if rank() == 0:
            written = Weights(folder)
            for name, value in own.items():
                if (found := written.find([name])) is not None:
                    assert torch.equal(written.read(found), value), name
        with ema.applied():
            now = weights(engine)
        assert_equal(now, weights(engine), "an average with decay 0 is the weights")
        return expected.item()


def test_evaluation_and_export_read_the_average(tmp_path: Path) -> None:
    on_ranks(2, evaluated, PLANS["2"], tmp_path)


def saved(config: dict[str, Any], folder: Path) -> tuple[dict[str, Tensor], ...]:
    with started(config) as engine:
        ema = engine.ema(DECAY)
        for _ in range(2):
            train(engine)
        engine.save(folder)
        with ema.applied():
            average = weights(engine)
        return average, weights(engine)


def loaded(config: dict[str, Any], folder: Path, average: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    with started(config) as engine:
        ema = engine.ema(DECAY)
        train(engine)
        engine.load(folder)
        with ema.applied():
            found = weights(engine)
        train(engine)
        new = weights(engine)
        with ema.applied():
            next_average = weights(engine)
        if rank() == 0:
            assert_equal(found, average, "the saved average")
            assert_equal(next_average, averaged(average, new), "the average after another step")
    with started(config) as engine:  # load the average as the model's weights; a new average starts from them
        ema = engine.ema(DECAY)
        engine.load(folder, only_model=True, prefix="ema")
        found = weights(engine)
        with ema.applied():
            first = weights(engine)
        if rank() == 0:
            assert_equal(found, average, "the average as weights")
            assert_equal(first, average, "the average of the average")
    with started(config) as engine:
        message = "has the average 'ema' of the weights, which is not loaded: call engine.ema(decay, name='ema') before"
        load_with_warning(engine, folder, message)
        found = weights(engine)
        if rank() == 0:
            assert_equal(found, own, "the saved weights")


def load_with_warning(engine: partita.Engine, folder: Path, message: str) -> None:
    """Load a checkpoint, and check that rank 0 warns."""
    if rank() == 0:
        with pytest.warns(UserWarning, match=re.escape(message)):
            engine.load(folder)
    else:
        engine.load(folder)


LOADS = [(2, {"zero": {"stage": 1}}), (4, PARALLEL["tensor"]), (1, {"zero": {"stage": 0}}), (4, PARALLEL["pipeline"])]


@pytest.mark.parametrize(("ranks", "config"), LOADS)
def test_checkpoints_hold_the_average_for_any_layout(ranks: int, config: dict[str, Any], tmp_path: Path) -> None:
    average, own = on_ranks(2, saved, {"zero": {"stage": 3}}, tmp_path)[0]
    assert any(not torch.equal(average[name], own[name]) for name in own)
    on_ranks(ranks, loaded, config, tmp_path, average, own)
    export_checkpoint(open_stored(tmp_path), tmp_path / "exported", None, None, prefix="ema")
    written = Weights(tmp_path / "exported")
    for name, value in average.items():
        found = written.find([name])
        assert found is not None
        assert torch.equal(written.read(found), value), name


class Normed(Stack):
    """Model with a buffer and a frozen parameter, which are not averaged."""

    def __init__(self) -> None:
        super().__init__(2)
        self.norm = torch.nn.BatchNorm1d(16)
        self.first.requires_grad_(False)


def partly(folder: Path) -> None:
    with partita.initialize(Normed(), {"zero": {"stage": 3}, "optimizer": ADAMW}) as engine:
        ema = engine.ema(DECAY)
        engine.module.norm.running_mean.fill_(3.0)
        engine.backward(square_loss(engine.module, rank(), 0))
        engine.step()
        engine.save(folder)
        with ema.applied():
            average = weights(engine)
    with partita.initialize(Normed(), {"zero": {"stage": 3}, "optimizer": ADAMW}) as engine:
        engine.load(folder, only_model=True, prefix="ema")
        if rank() == 0:
            assert average["norm.running_mean"].unique().tolist() == [3.0]
        found = weights(engine)
        if rank() == 0:
            assert_equal(found, average, "the average with buffers and frozen parameters")
    with partita.initialize(Normed(), {"zero": {"stage": 3}, "optimizer": ADAMW}) as engine:
        engine.save(folder / "another")
        saved_weights = weights(engine)
        ema = engine.ema(DECAY)
        for step in (1, 2):
            engine.backward(square_loss(engine.module, rank(), step))
            engine.step()
        load_with_warning(
            engine, folder / "another", "has no average 'ema' of the weights: it starts from the loaded weights"
        )
        with ema.applied():
            found = weights(engine)
        if rank() == 0:
            assert_equal(found, saved_weights, "the average starts from the loaded weights")


def test_what_is_not_averaged_comes_from_the_model(tmp_path: Path) -> None:
    on_ranks(2, partly, tmp_path)


def decayed() -> None:
    with started({"zero": {"stage": 2}}) as engine:
        ema = engine.ema(lambda step: min(0.9, (1 + step) / (10 + step)))
        expected = weights(engine)
        for step in (1, 2, 3):
            train(engine)
            expected = averaged(expected, weights(engine), (1 + step) / (10 + step))
        with ema.applied():
            assert_equal(weights(engine), expected, "the decay follows the step")


def test_a_decay_by_step() -> None:
    on_ranks(2, decayed)


def interrupted() -> None:
    """Check that an error on all ranks restores the weights, and that one rank's error raises PartitaError on all."""
    with started({"zero": {"stage": 1}}) as engine:
        ema = engine.ema(DECAY)
        train(engine)
        own = weights(engine)
        with pytest.raises(ValueError, match="on all ranks"), ema.applied():
            raise ValueError("on all ranks")
        assert_equal(weights(engine), own, "the weights after an error")
        train(engine)
    with pytest.raises(PartitaError):
        with started({"zero": {"stage": 3}, "communication": {"timeout_s": 60}}) as engine:
            with engine.ema(DECAY).applied():
                if rank() == 1:
                    raise ValueError("on one rank")
                engine.eval_batch([CASES["llama"].batch(2, 7)])
    with pytest.raises(PartitaError, match=r"ema\.applied: the engine is closed"):
        with ema.applied():
            pass


def test_an_error_inside_the_block() -> None:
    on_ranks(2, interrupted, timeout=200)


INSIDE: dict[str, Callable[[partita.Engine], Any]] = {
    "engine.step": lambda engine: engine.step(),
    "engine.backward": lambda engine: engine.backward(square_loss(engine.module, 0, 0)),
    "engine.train_batch": lambda engine: engine.train_batch([torch.zeros(1, 8)]),
    "engine.save": lambda engine: engine.save("folder"),
    "engine.load": lambda engine: engine.load("folder"),
    "engine.gathered(modify=True)": lambda engine: engine.gathered(modify=True),
    "engine.ema": lambda engine: engine.ema(0.5, name="other"),
}


def test_what_would_train_the_average_is_refused() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        ema = engine.ema(0.5)
        with ema.applied():
            for call, function in INSIDE.items():
                with pytest.raises(PartitaError, match=re.escape(f"{call}: inside the block of ema.applied()")):
                    function(engine)
            with pytest.raises(PartitaError, match=r"an average is applied already: leave its block first"):
                with ema.applied():
                    pass
        engine.backward(square_loss(engine.module, 0, 0))
        with pytest.raises(PartitaError, match=r"ema\.applied\(\) after a backward:"):
            with ema.applied():
                pass
        engine.step()
        with ema.applied():
            pass


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({}, {"decay": 1.5}, "engine.ema: expected a decay between 0 and 1, or a function; got 1.5"),
        (
            {},
            {"decay": 0.5, "name": "model"},
            "name 'model' cannot be the prefix of keys in a checkpoint: pass",
        ),
        ({}, {"decay": 0.5, "name": "a.b"}, "name 'a.b' cannot be the prefix of keys"),
        (
            {"precision": {"gradients": "in_backward"}},
            {"decay": 0.5},
            "engine.ema: with precision.gradients: in_backward, gradients are applied and freed in backward; set ",
        ),
    ],
)
def test_wrong_arguments(config: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with partita.initialize(Stack(2), config) as engine:
        with pytest.raises(PartitaError, match=re.escape(message)):
            engine.ema(**arguments)


def test_a_second_average_needs_a_name() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        engine.ema(0.5)
        with pytest.raises(PartitaError, match=r"name 'ema' is another average's: pass another one"):
            engine.ema(0.9)


def test_a_decay_that_a_function_returns_is_checked() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        ema = engine.ema(lambda step: 2.0)
        engine.backward(square_loss(engine.module, 0, 0))
        engine.step()
        with pytest.raises(PartitaError, match=r"expected a decay between 0 and 1; got 2\.0 for step 1"):
            with ema.applied():
                pass


def separate() -> None:
    config = {"communication": {"every": 2, "replicas": 2}, "zero": {"stage": 1}}
    with partita.initialize(Stack(2), config) as engine:
        with pytest.raises(PartitaError, match=r"replicas that train separately \(communication\.every\)"):
            engine.ema(0.5)


def test_replicas_that_train_separately_are_refused() -> None:
    on_ranks(2, separate)


def test_optimizers_that_evaluate_the_loss_are_refused() -> None:
    model = Stack(2)
    with partita.initialize(model, {"zero": {"stage": 0}}, optimizer=torch.optim.LBFGS(model.parameters())) as engine:
        engine.ema(0.5)
        with pytest.raises(PartitaError, match=r"LBFGS evaluates the loss several times; not with engine\.ema"):
            engine.step(lambda: square_loss(engine.module, 0, 0))
