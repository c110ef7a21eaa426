"""Train small models with an engine, or with plain PyTorch on the samples of all ranks, and compare what came of it.

`train` takes a case of the kit and a whole config, `train_reference` the case; `assert_same_bits` and `assert_close`
compare two runs. `Recipe` is a model with a loss of its own: `train_recipe` trains it at one stage, `check` at every
stage, each compared with the first one and with plain PyTorch. Other loops use `train_engine` and `train_module`.
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

ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}  # a large eps: gradients of nothing but rounding stay small
FLOOR = 1e-8  # a gradient below it is none


def module_of(model: Any) -> Any:
    """The user's module, of an engine or as it is."""
    return model.module if isinstance(model, partita.Engine) else model


def backward(model: Any, loss: Tensor) -> None:
    """A backward of the loss's own, by an engine, or by plain PyTorch as one of the ranks'."""
    if isinstance(model, partita.Engine):
        model.backward(loss)
    else:
        (loss / world()).backward()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


Loss = Callable[[Any, int, int], Tensor | None]  # of an engine or a module, a data rank's samples, and a step


@dataclass
class Trained:
    """Results of a run, on one rank.

    For each step the loss, the gradient norm, whether parameters were updated, the full gradients (of the steps that
    were asked for), and what `look` returned; at the end the full weights.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    looks: list[Any] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Recipe:
    """A model, its loss on each rank, and how it is trained.

    ``loss(model, rank, step)`` is called with the engine or with a plain module. ``before_step`` may change the module
    (freeze, unfreeze) before each step. ``plain``: whether plain PyTorch on all ranks' samples has the same gradients.
    """

    build: Callable[[], nn.Module]
    loss: Loss = square_loss
    num_steps: int = 3
    config: Mapping[str, Any] = field(default_factory=dict)
    before_step: Callable[[Any, int], None] = lambda module, step: None
    ignored: str = ""  # the beginning of a warning that is expected
    plain: bool = True
    bucket_bytes: int = 1

    def built(self) -> nn.Module:
        seeds.start()
        return self.build()


@contextlib.contextmanager
def quiet(message: str) -> Iterator[None]:
    """Without warnings that begin with ``message``."""
    with warnings.catch_warnings():
        if message:
            warnings.filterwarnings("ignore", message)
        yield


def small_buckets(num_bytes: int = 1) -> Any:
    """Every segment of more than ``num_bytes`` has a bucket of its own, so that their order matters."""
    return mock.patch.object(blueprint, "share_buckets", functools.partial(share_buckets, max_bytes=num_bytes))


# -- a case of the kit -------------------------------------------------------------------------------------------------

SAMPLES = 4  # of a data rank and step


def loss_of(case: Case) -> Loss:
    """The loss of a case on SAMPLES samples, which differ by data rank and step."""
    return lambda model, data, step: case.loss(model(**case.batch(SAMPLES, 1000 * step + data)))


def train(
    case: Case, config: Mapping[str, Any], *, steps: int = 3, look: Callable[[partita.Engine, int], Any] | None = None
) -> Trained:
    """Train a case with an engine on the ranks that run, whatever the config; ``look(engine, step)`` after each step.

    Ranks with one data coordinate have the same samples. Pipelines and accumulated micro-batches are trained by
    `engine.train_batch`, after which there are no gradients to keep; their losses are means over the data ranks.
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
        data: the data rank whose samples the loss is computed of (by default the rank).
        keep: the steps whose gradients are kept (by default all, if the engine keeps any).
        mean: record the loss's mean over the ranks rather than this rank's.
    """
    result = Trained()
    names = [name for name, _ in engine.module.named_parameters()]
    if engine.config.precision.gradients == "in_backward":
        names = []  # there are none to look at
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
    """Train with plain PyTorch on the samples of ``num_data`` data ranks: the mean of their gradients.

    ``own``: the data rank whose losses are recorded, or None for the mean of all. Norms are recorded with ``clip``. The
    optimizer is by default AdamW, as `train` has it.
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
    """Every parameter, whole, on every rank."""
    with engine.gathered():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


# -- a recipe ----------------------------------------------------------------------------------------------------------


def train_recipe(recipe: Recipe, zero: Mapping[str, Any]) -> Trained:
    """Train a recipe with this `zero` section, on the ranks that run; between steps the engine is idle."""
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
    """Train a recipe with plain PyTorch, in one process, on the samples of all ranks."""
    return train_module(
        recipe.built(),
        recipe.loss,
        recipe.num_steps,
        num_data=world(),
        own=rank(),
        before_step=recipe.before_step,
    )


def check(recipe: Recipe, stages: Mapping[str, Mapping[str, Any]] = ZERO) -> None:
    """Every stage trains bitwise as the first one does, and that one as plain PyTorch does."""
    with quiet(recipe.ignored):
        results = {name: train_recipe(recipe, zero) for name, zero in stages.items()}
        base = next(iter(stages))
        for name, result in results.items():
            assert_same_bits(result, results[base], f"stage {name} against {base}")
        if recipe.plain:
            assert_close(results[base], train_plain(recipe))


# -- comparisons -------------------------------------------------------------------------------------------------------


def assert_same_bits(one: Trained, other: Trained, what: str = "", *, losses: bool = True) -> None:
    """Losses, norms (also those that are not finite) and weights are equal bit for bit.

    Gradients, which ranks may have summed in another order for `engine.gradient`, are equal to 1e-5. ``losses=False``
    leaves the losses out, which differ between data ranks.
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
    differ = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    assert not differ, f"{what}: weights {differ} differ"


def assert_close(one: Trained, plain: Trained) -> None:
    """Losses, gradients and weights are those of plain PyTorch, as far as sums in another order allow."""
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
    """Losses, norms and kept gradients are those of plain PyTorch to ``tolerance``, a share of each largest element.

    ``losses=False`` leaves the losses out, which differ between data ranks.
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
