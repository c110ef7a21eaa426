"""Train a model under every plan and hold the results against stage 0, bitwise, and against plain PyTorch."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.plan.planned_bucket import share_buckets
from partita.planner import blueprint
from partita.sharding.unit import UnitState
from tests.kit import seeds

WIDTH = 16
PLANS: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-kept": {"stage": 3, "keep_gathered": True},
}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}  # a large eps: gradients of nothing but rounding stay small


class Block(nn.Module):
    """[..., WIDTH] to the same, with a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers of the root unit."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inputs(rank: int, step: int, *shape: int) -> Tensor:
    """[4, WIDTH] (or the given shape), others for each rank and step."""
    generator = seeds.generator(1000 * step + rank)
    return torch.randn(shape or (4, WIDTH), generator=generator)


def square_loss(model: Any, rank: int, step: int) -> Tensor:
    loss: Tensor = model(inputs(rank, step)).square().mean()
    return loss


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


Loss = Callable[[Any, int, int], Tensor | None]


@dataclass
class Trained:
    """What a run left behind: per step the loss, the norm and the whole gradients; at the end the whole weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
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


def train(recipe: Recipe, zero: Mapping[str, Any]) -> Trained:
    """Train under one plan, on the ranks that run."""
    config = {"optimizer": ADAMW, **recipe.config, "zero": {**recipe.config.get("zero", {}), **zero}}
    result = Trained()
    with (
        small_buckets(recipe.bucket_bytes),
        partita.initialize(recipe.built(), config) as engine,
    ):
        names = [name for name, _ in engine.module.named_parameters()]
        if engine.config.precision.gradients == "in_backward":
            names = []  # there are none to look at
        for step in range(recipe.num_steps):
            recipe.before_step(engine.module, step)
            loss = recipe.loss(engine, rank(), step)
            if loss is not None:
                engine.backward(loss)
            result.gradients.append({name: engine.gradient(name) for name in names})
            outcome = engine.step()
            result.losses.append(0.0 if loss is None else loss.item())
            result.norms.append(outcome.grad_norm)
            assert_idle(engine)
        result.weights = whole_weights(engine)
    return result


def train_plain(recipe: Recipe) -> Trained:
    """Train one process on what all the ranks see: the mean of their gradients."""
    model, result = recipe.built(), Trained()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(recipe.num_steps):
        recipe.before_step(model, step)
        optimizer.zero_grad()
        for other in range(world()):
            loss = recipe.loss(model, other, step)
            if loss is not None:
                (loss / world()).backward()
            if other == rank():
                result.losses.append(0.0 if loss is None else loss.item())
        result.gradients.append(
            {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        )
        optimizer.step()
    result.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


def check(recipe: Recipe, plans: Mapping[str, Mapping[str, Any]] = PLANS) -> None:
    """Every plan trains bitwise as the first one does, and that one as plain PyTorch does."""
    with quiet(recipe.ignored):
        results = {name: train(recipe, zero) for name, zero in plans.items()}
        base = next(iter(plans))
        for name, result in results.items():
            same(result, results[base], f"plan {name} against {base}")
        if recipe.plain:
            close(results[base], train_plain(recipe))


def same(one: Trained, other: Trained, what: str) -> None:
    """Losses, norms (also those that are no numbers) and weights are equal bit for bit."""
    assert str(one.losses) == str(other.losses), f"{what}: losses {one.losses}, {other.losses}"
    assert str(one.norms) == str(other.norms), f"{what}: norms {one.norms}, {other.norms}"
    for step, (mine, theirs) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        for name, grad in mine.items():
            assert (grad is None) == (theirs[name] is None), f"{what}: gradient of {name} in step {step}"
            if grad is not None:
                where = f"{what}: {name}, step {step}"
                torch.testing.assert_close(grad, theirs[name], rtol=1e-5, atol=1e-6, equal_nan=True, msg=where)
    differ = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
    assert not differ, f"{what}: weights {differ} differ"


def close(one: Trained, plain: Trained) -> None:
    """The same training as plain PyTorch's, as far as sums in another order allow."""
    torch.testing.assert_close(one.losses, plain.losses, rtol=1e-4, atol=1e-6)
    for step, (mine, theirs) in enumerate(zip(one.gradients, plain.gradients, strict=True)):
        for name, expected in theirs.items():
            got = mine[name]
            assert (got is None) == (expected is None), f"gradient of {name} in step {step}: {got}, {expected}"
            if got is not None and expected is not None:
                torch.testing.assert_close(got, expected.float(), rtol=1e-3, atol=1e-5, msg=f"{name} in step {step}")
    for name, expected in plain.weights.items():
        torch.testing.assert_close(one.weights[name], expected, rtol=1e-3, atol=1e-4, msg=name)


def whole_weights(engine: partita.Engine) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank."""
    with engine.gathered():
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def assert_idle(engine: partita.Engine) -> None:
    """Between steps nothing is open: units rest, all slots of all pools are back, no reduction is under way."""
    unsharder, reducer = engine._parts.runtime.unsharder, engine._parts.runtime.reducer
    open_units = [
        u.title for u in unsharder.units if u.state is not UnitState.SHARDED or u.open_calls or u.pinned or u.slot
    ]
    assert not open_units, f"open: {open_units}"
    held = engine.memory_report().held
    assert _free_bytes(engine._parts.runtime._pool) == held.get(("buffer_pool", "device"), 0)
    pools = tuple(reducer.pools)
    assert sum(map(_free_bytes, pools)) == sum(held.get(("buckets", tier), 0) for tier in ("device", "host"))
    assert all((bucket.buffer.full is None) == bucket.passes for bucket in reducer.buckets if bucket.buffer.collects)


def _free_bytes(pool: Any) -> int:
    return sum(slot.num_bytes for slots in pool._free.values() for slot in slots)
