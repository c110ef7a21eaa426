"""Train small models with an engine, or with plain PyTorch on the samples of all ranks, and compare the results.

`train` takes a case of the kit and a full config, `train_reference` only the case; `assert_same_bits` and
`assert_close` compare two runs. `Recipe` is a model with its own loss: `train_recipe` trains it at one stage, `check`
at every stage, and compares each with the first stage and the first with plain PyTorch. Other loops use `train_engine`
and `train_module`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partita
from partita.layout import blueprint
from partita.table.planned_bucket import share_buckets
from tests.kit import seeds
from tests.kit.models import Case, square_loss
from tests.kit.plans import ZERO
from tests.kit.state import assert_idle

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}  # large eps: gradients that are rounding errors change little
FLOOR = 1e-8  # the smallest absolute tolerance of gradients


def module_of(model: Any) -> Any:
    """Return an engine's module, or the module itself."""
    return model.module if isinstance(model, partita.Engine) else model


def backward(model: Any, loss: Tensor) -> None:
    """Call the engine's backward; for a plain module, the loss's backward, divided by the number of ranks."""
    if isinstance(model, partita.Engine):
        model.backward(loss)
    else:
        (loss / world()).backward()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


Loss = Callable[[Any, int, int], Tensor | None]  # (engine or module, data rank, step) -> loss; None: no backward


@dataclass
class Trained:
    """Results of a run on one rank.

    Per step: the loss, the gradient norm, True if parameters were updated, the full gradients (only of the kept steps),
    and the result of `look`. At the end: the full weights.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    looks: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Recipe:
    """A model, its loss on each rank, and its training settings.

    ``loss(model, rank, step)`` is called with the engine or with a plain module. ``before_step`` may change the module
    (freeze, unfreeze) before each step. ``plain``: True if plain PyTorch on all ranks' samples has the same gradients.
    """

    build: Callable[[], nn.Module]
    loss: Loss = square_loss
    num_steps: int = 3
    config: Mapping[str, Any] = field(default_factory=dict)
    before_step: Callable[[Any, int], None] = lambda module, step: None
    ignored: str = ""  # the beginning of an expected warning
    plain: bool = True
    bucket_bytes: int = 1

    def built(self) -> nn.Module:
        seeds.start()
        return self.build()


@contextlib.contextmanager
def quiet(message: str) -> Iterator[None]:
    """Ignore warnings that begin with ``message``."""
    with warnings.catch_warnings():
        if message:
            warnings.filterwarnings("ignore", message)
        yield


def small_buckets(num_bytes: int = 1) -> Any:
    """Limit buckets to ``num_bytes``: each larger segment gets its own bucket, so that the order of buckets matters."""
    return mock.patch.object(blueprint, "share_buckets", functools.partial(share_buckets, max_bytes=num_bytes))


# -- a case of the kit -------------------------------------------------------------------------------------------------

SAMPLES = 4  # per data rank and step


def loss_of(case: Case) -> Loss:
    """Return a case's loss function; its SAMPLES samples differ by data rank and step."""
    return lambda model, data, step: case.loss(model(**case.batch(SAMPLES, 1000 * step + data)))


def train(
    case: Case, config: Mapping[str, Any], *, steps: int = 3, look: Callable[[partita.Engine, int], Any] | None = None
) -> Trained:
    """Train a case with an engine on the running ranks under any config; ``look(engine, step)`` is called after a step.

    Ranks with the same data coordinate have the same samples. Pipelines and accumulated micro-batches are trained by
    `engine.train_batch`: no gradients are recorded, and losses are means over the data ranks.
    """
    with partita.initialize(case.build(), {"optimizer": ADAMW, **config}, loss_fn=case.loss_of_batch) as engine:
        if engine.mesh.size("pipeline") > 1 or engine.config.batch.accumulate not in (1, "auto"):
            return _train_batches(engine, case, steps, look)
        return train_engine(engine, loss_of(case), steps, data=engine.mesh.coordinate("data"), look=look)


def train_reference(case: Case, *, steps: int = 3, num_data: int | None = None) -> Trained:
    """Train a case with plain PyTorch, in one process, on the samples of all ranks or of ``num_data`` data ranks."""
    own = rank() if num_data is None else None
    return train_module(case.build(), loss_of(case), steps, num_data=num_data or world(), own=own)


# -- any engine, any module --------------------------------------------------------------------------------------------


def train_engine(
    engine: partita.Engine,
    loss: Loss,
    num_steps: int,
    *,
    data: int | None = None,
    keep: Container[int] | None = None,
    mean: bool = False,
    before_step: Callable[[Any, int], None] = lambda module, step: None,
    look: Callable[[partita.Engine, int], Any] | None = None,
) -> Trained:
    """Train with an engine, one backward for each step.

    Args:
        data: the data rank that selects the samples (by default this rank).
        keep: the steps whose gradients are recorded (by default all steps).
        mean: record the mean of the loss over ranks instead of this rank's loss.
    """
    result = Trained()
    names = [name for name, _ in engine.module.named_parameters()]
    if engine.config.precision.gradients == "in_backward":
        names = []  # the engine frees gradients during backward
    for step in range(num_steps):
        before_step(engine.module, step)
        found = loss(engine, rank() if data is None else data, step)
        if found is not None:
            engine.backward(found)
        if keep is None or step in keep:
            result.gradients.append({name: engine.gradient(name) for name in names})
        outcome = engine.step()
        result.losses.append(0.0 if found is None else (engine.mean(found) if mean else found).item())
        result.norms.append(outcome.grad_norm)
        result.stepped.append(outcome.stepped)
        if look is not None:
            result.looks.append(look(engine, step))
    result.weights = whole_weights(engine)
    return result


def train_module(
    model: nn.Module,
    loss: Loss,
    num_steps: int,
    *,
    num_data: int,
    own: int | None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    clip: float | None = None,
    keep: Container[int] | None = None,
    before_step: Callable[[Any, int], None] = lambda module, step: None,
) -> Trained:
    """Train with plain PyTorch on the mean gradient of ``num_data`` data ranks' samples.

    ``own`` is the data rank whose losses are recorded, or None for the mean of all. Norms are recorded only with
    ``clip``. The default optimizer is the AdamW of `train`.
    """
    result, params = Trained(), model.parameters()
    chosen = torch.optim.AdamW(params, **ADAMW) if optimizer is None else optimizer(params)
    for step in range(num_steps):
        before_step(model, step)
        chosen.zero_grad()
        losses = []
        for data in range(num_data):
            found = loss(model, data, step)
            if found is not None:
                (found / num_data).backward()
            losses.append(0.0 if found is None else found.item())
        result.losses.append(fmean(losses) if own is None else losses[own])
        if keep is None or step in keep:
            named = model.named_parameters()
            result.gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in named})
        norm = None if clip is None else nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        result.norms.append(norm)
        result.stepped.append(True)
        chosen.step()
    result.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def _train_batches(
    engine: partita.Engine, case: Case, num_steps: int, look: Callable[[partita.Engine, int], Any] | None
) -> Trained:
    result, data = Trained(), engine.mesh.coordinate("data")
    accumulate = engine.config.batch.accumulate
    num_micros = accumulate if isinstance(accumulate, int) else 1
    for step in range(num_steps):
        batches = (case.batch(SAMPLES, 1000 * step + 100 * micro + data) for micro in range(num_micros))
        result.losses.append(engine.train_batch(batches).item())
        result.norms.append(engine.last_step.grad_norm)
        result.stepped.append(engine.last_step.stepped)
        if look is not None:
            result.looks.append(look(engine, step))
    result.weights = whole_weights(engine)
    return result


def whole_weights(engine: partita.Engine) -> dict[str, Tensor]:
    """Return every full parameter, on every rank."""
    with engine.gathered():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


# -- a recipe ----------------------------------------------------------------------------------------------------------


def train_recipe(recipe: Recipe, zero: Mapping[str, Any]) -> Trained:
    """Train a recipe with this `zero` section on the running ranks; assert that the engine is idle between steps."""
    config = {"optimizer": ADAMW, **recipe.config, "zero": {**recipe.config.get("zero", {}), **zero}}
    with small_buckets(recipe.bucket_bytes), partita.initialize(recipe.built(), config) as engine:
        return train_engine(
            engine,
            recipe.loss,
            recipe.num_steps,
            before_step=recipe.before_step,
            look=lambda engine, step: assert_idle(engine),
        )


def train_plain(recipe: Recipe) -> Trained:
    """Train a recipe with plain PyTorch in one process, on the samples of all ranks."""
    return train_module(
        recipe.built(),
        recipe.loss,
        recipe.num_steps,
        num_data=world(),
        own=rank(),
        before_step=recipe.before_step,
    )


def check(recipe: Recipe, stages: Mapping[str, Mapping[str, Any]] = ZERO) -> None:
    """Assert that every stage trains bitwise like the first one, and the first one like plain PyTorch to rounding."""
    with quiet(recipe.ignored):
        results = {name: train_recipe(recipe, zero) for name, zero in stages.items()}
        base = next(iter(stages))
        for name, result in results.items():
            assert_same_bits(result, results[base], f"stage {name} against {base}")
        if recipe.plain:
            assert_close(results[base], train_plain(recipe))


# -- comparisons -------------------------------------------------------------------------------------------------------


def assert_same_bits(one: Trained, other: Trained, what: str = "", *, losses: bool = True) -> None:
    """Assert that losses, norms (including non-finite ones) and weights are bitwise equal.

    Gradients must agree to 1e-5: `engine.gradient` may sum ranks in another order. ``losses=False`` skips the losses,
    which differ between data ranks.
    """
    if losses:
        assert str(one.losses) == str(other.losses), f"{what}: losses {one.losses}, {other.losses}"
    assert str(one.norms) == str(other.norms), f"{what}: norms {one.norms}, {other.norms}"
    assert one.stepped == other.stepped, f"{what}: updates {one.stepped}, {other.stepped}"
    for step, (mine, theirs) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        for name, grad in mine.items():
            assert (grad is None) == (theirs[name] is None), f"{what}: gradient of {name} in step {step}"
            if grad is not None:
                where = f"{what}: {name}, step {step}"
                torch.testing.assert_close(grad, theirs[name], rtol=1e-5, atol=1e-6, equal_nan=True, msg=where)
    assert one.weights.keys() == other.weights.keys(), f"{what}: the weights have other names"
    differ = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    assert not differ, f"{what}: weights {differ} differ"


def assert_close(one: Trained, plain: Trained) -> None:
    """Assert that losses, gradients and weights agree with plain PyTorch, up to the order of sums."""
    torch.testing.assert_close(one.losses, plain.losses, rtol=1e-4, atol=1e-6)
    for step, (mine, theirs) in enumerate(zip(one.gradients, plain.gradients, strict=True)):
        for name, expected in theirs.items():
            got = mine[name]
            assert (got is None) == (expected is None), f"gradient of {name} in step {step}: {got}, {expected}"
            if got is not None and expected is not None:
                torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=1e-5, msg=f"{name} in step {step}")
    for name, expected in plain.weights.items():
        torch.testing.assert_close(one.weights[name], expected, rtol=1e-3, atol=1e-4, msg=name)


def assert_exact(one: Trained, plain: Trained, what: str = "", *, tolerance: float = 1e-5, losses: bool = True) -> None:
    """Assert that losses, norms and recorded gradients agree with plain PyTorch to ``tolerance``.

    The tolerance is absolute for losses, relative for norms, and relative to the largest element of each gradient.
    ``losses=False`` skips the losses, which differ between data ranks.
    """
    if losses:
        assert one.losses == pytest.approx(plain.losses, rel=0, abs=tolerance), f"{what}: losses"
    assert one.norms == pytest.approx(plain.norms, rel=tolerance, abs=0), f"{what}: norms"
    for step, (mine, theirs) in enumerate(zip(one.gradients, plain.gradients, strict=True)):
        have, wanted = ({name for name, grad in each.items() if grad is not None} for each in (mine, theirs))
        assert have == wanted, f"{what}: gradients in step {step}: {sorted(have ^ wanted)} are not in both"
        for name in wanted:
            got, expected = mine[name], theirs[name]
            assert got is not None
            assert expected is not None
            most = max(tolerance * expected.abs().max().item(), FLOOR)
            where = f"{what}: {name}, step {step}"
            torch.testing.assert_close(
                got, expected, rtol=0, atol=most, msg=lambda said, where=where: f"{where}: {said}"
            )
