"""Outputs with tensors and views of parameters in objects of any class: the results of stage 0, or an error."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import AffineTransform, Independent, MultivariateNormal, Normal, TransformedDistribution

import partita
from partita import PartitaError
from tests.kit import seeds
from tests.kit.models import WIDTH, Block, inputs
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.state import assert_idle
from tests.kit.training import Recipe, check, module_of, rank

KEEPS = "'.*' returned a .* that holds a parameter"


class State:
    """The value that each block passes to the next one, of a user-defined class."""

    def __init__(self, h: Tensor, loss: Tensor) -> None:
        self.h, self.loss = h, loss


class OwnWeights(nn.Module):
    """A unit without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, state: State) -> State:
        y = torch.tanh(state.h @ self.up) @ self.down
        return State(torch.tanh(y) + state.h, state.loss + y.square().mean())


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: State) -> State:
        h = self.block(state.h)
        return State(h, state.loss + h.square().mean())


class States(nn.Module):
    """Blocks that take and return an object."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([kind() for _ in range(3)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> State:
        state = State(x, x.new_zeros(()))
        for block in self.blocks:
            state = block(state)
        return State(self.last(state.h), state.loss)


def state_loss(model: Any, rank: int, step: int) -> Tensor:
    state = model(inputs(rank, step))
    return state.h.square().mean() + 0.1 * state.loss


class Policy(nn.Module):
    """Returns the distribution ``make(mean, scale)``, whose scale is a parameter."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.mean = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.make(self.mean(x), self.scale)


class InnerPolicy(nn.Module):
    """Returns a distribution that an inner unit made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.policy = Policy(lambda mean, scale: {"actions": [Independent(Normal(mean, scale), 1)]})

    def forward(self, x: Tensor) -> Any:
        return self.policy(self.first(x))["actions"][0]


def likelihood(model: Any, rank: int, step: int) -> Tensor:
    distribution = model(inputs(rank, step))
    return -distribution.log_prob(inputs(rank, step + 1)).mean() + 0.1 * distribution.stddev.square().mean()


def log_likelihood(model: Any, rank: int, step: int) -> Tensor:
    return -model(inputs(rank, step)).log_prob(inputs(rank, step + 1)).mean()


class Closures(nn.Module):
    """Blocks that return closures over views of their weights."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self) -> Callable[[Tensor], Tensor]:
            weight = self.weight.t()
            return lambda x: torch.tanh(x @ weight)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Closures.Inner() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        layers = [block() for block in self.blocks]
        x = self.first(x)
        for layer in layers:
            x = x + layer(x)
        return x


RECIPES: dict[str, Recipe] = {
    "states": Recipe(lambda: States(OwnWeights), state_loss),
    "states of layers": Recipe(lambda: States(Layers), state_loss),
    "states, recomputed": Recipe(lambda: States(Layers), state_loss, config={"activations": {"checkpoint": "units"}}),
    "normal": Recipe(lambda: Policy(lambda mean, scale: Independent(Normal(mean, scale), 1)), likelihood),
    "inner normal": Recipe(InnerPolicy, likelihood, config={"zero": {"units": ["Policy", "Block"]}}),
    "closures": Recipe(Closures, ignored="'buffer_pool' .* grows"),
    "views on modules": Recipe(lambda: KeepsViews()),
    "views in containers": Recipe(lambda: KeepsViewsInContainers()),
    "views in graphs": Recipe(lambda: nn.Sequential(*[UsesOwnLinear() for _ in range(3)])),
    # These outputs hold the parameter itself.
    "multivariate normal": Recipe(
        lambda: Policy(lambda mean, scale: MultivariateNormal(mean, scale_tril=scale.diag())), likelihood
    ),
    "lower triangle": Recipe(lambda: Triangle(), likelihood, ignored=KEEPS),
    "transformed": Recipe(
        lambda: Policy(lambda mean, scale: TransformedDistribution(Normal(mean, 1.0), AffineTransform(1.0, scale))),
        log_likelihood,
        ignored=KEEPS,
    ),
}


class Triangle(Policy):
    def __init__(self) -> None:
        super().__init__(lambda mean, scale: MultivariateNormal(mean, scale_tril=scale, validate_args=False))
        self.scale = nn.Parameter((torch.eye(WIDTH) + 0.1).tril())


SHARDED = {name: ZERO[name] for name in ("0", "3", "3-kept")}


def trains(name: str) -> None:
    check(RECIPES[name], SHARDED)


def kept_over_a_step() -> None:
    """Check that a distribution from before an update can be read after it."""
    for zero in SHARDED.values():
        seeds.start()
        with partita.initialize(RECIPES["normal"].build(), {"zero": zero}) as engine:
            with torch.no_grad():
                before = engine(inputs(rank(), 0))
                copied = copy.deepcopy(before)
            scale = before.stddev.clone()
            engine.backward(likelihood(engine, rank(), 0))
            engine.step()
            assert torch.equal(copied.stddev, scale)
            with torch.no_grad():
                assert before.log_prob(inputs(rank(), 1)).isfinite().all()


def keeps_whole_once() -> None:
    """Check that a unit whose output holds a parameter stays unsharded until the step, with one warning."""
    with partita.initialize(Triangle(), {"zero": {"stage": 3}}) as engine:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in range(2):
                engine.backward(likelihood(engine, rank(), step))
                engine.step()
                assert_idle(engine)
        assert [str(each.message) for each in said] == [
            "'Triangle (root)' returned a MultivariateNormal that holds a parameter, so its parameters stay unsharded "
            "until the step ends; to save this memory, return copies (param.clone()) or tensors"
        ]


class Generates(nn.Module):
    """Returns a started generator that holds a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        def run() -> Any:
            weight = self.weight.t()
            yield None
            yield x @ weight

        running = run()
        next(running)
        return running


class UsesGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), Generates()

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.inner(self.first(x))
        return y


def refused() -> None:
    with partita.initialize(UsesGenerator(), {"zero": {"stage": 3, "units": ["Generates"]}}) as engine:
        said = r"'inner' returned a generator that holds a view of a parameter.*view.clone\(\)"
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(PartitaError, match=said):
                engine(inputs(rank(), 0))
        module = module_of(engine)
        module.inner.forward = lambda x: torch.tanh(x @ module.inner.weight)[None]
        engine.backward(engine(inputs(rank(), 0)).sum())
        assert engine.step().stepped
        assert_idle(engine)


class KeepsViews(nn.Module):
    """Blocks store a view of a weight as an attribute, which the model reads after the blocks have run."""

    class Inner(Block):
        kept: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.up.weight.t()
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([KeepsViews.Inner() for _ in range(3)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        kept = torch.stack([block.kept for block in self.blocks])  # type: ignore[arg-type]
        return self.last(x) + 0.1 * kept.square().mean()


class KeepsViewsInContainers(KeepsViews):
    """Blocks store views in lists and dicts, which must stay the same objects."""

    class Inner(Block):
        def __init__(self) -> None:
            super().__init__()
            self.views: list[Any] = []
            self.by_name: dict[str, Any] = {"all": self.views}

        def forward(self, x: Tensor) -> Tensor:
            assert self.by_name["all"] is self.views
            weight = self.up.weight.t()
            self.views[:] = [weight, (weight, [self.down.weight[0]])]
            return super().forward(x)

        @property
        def kept(self) -> Tensor:  # type: ignore[override]
            assert self.views[0] is self.views[1][0]
            return self.views[0] + self.views[1][1][0].sum()  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([KeepsViewsInContainers.Inner() for _ in range(3)])


class Leaks(nn.Module):
    """Returns a view that an inner unit has stored in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Leaks.Inner(), nn.Linear(WIDTH, WIDTH)

    class Inner(nn.Linear):
        kept: State

        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = State(self.weight.t(), x)
            return super().forward(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.inner(x)), self.inner.kept.h


class NoRoot(nn.Module):
    """Returns and keeps views of its first block's weight. The model has no parameters outside its blocks."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weight: Any = self.blocks[0].up.weight
        self.kept = [weight[1]]
        for block in self.blocks:
            x = block(x)
        return x, {"row": weight[0]}


def without_a_root(zero: dict[str, Any]) -> None:
    """Check that returned and kept views have the values of their forward after a step, and pass gradients on."""
    seeds.start()
    model = NoRoot()
    rows = model.blocks[0].up.weight[:2].detach().clone()  # type: ignore[union-attr, index]
    with partita.initialize(model, {"zero": zero}) as engine, warnings.catch_warnings(action="ignore"):
        output, held = engine(inputs(rank(), 0))
        engine.backward(output.sum() * 0 + held["row"].sum())
        grad = engine.gradient("blocks.0.up.weight")
        assert grad is not None
        assert torch.equal(grad[:2], torch.stack([torch.ones(WIDTH), torch.zeros(WIDTH)]))
        engine.step()
        assert torch.equal(torch.stack([held["row"], *model.kept]), rows)
        with torch.no_grad():
            _, held = engine(inputs(rank(), 0))
        engine.backward(engine(inputs(rank(), 1))[0].sum())
        engine.step()
        assert not torch.equal(held["row"], rows[0])  # that of the first update
        assert_idle(engine)


class OwnLinear(torch.autograd.Function):
    """A matrix product that keeps a view of the weight for backward, as an attribute of ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight.t(), x
        return x @ ctx.weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight.t(), grad.flatten(0, -2).t() @ ctx.x.flatten(0, -2)


class UsesOwnLinear(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + OwnLinear.apply(x, self.up.weight)[..., :WIDTH]  # type: ignore[no-untyped-call]


def leaked() -> None:
    with partita.initialize(Leaks(), {"zero": {"stage": 3, "units": ["Inner"]}}) as engine:
        for _ in range(2):
            with pytest.raises(
                PartitaError, match=r"'Leaks \(root\)' returned a tuple that holds a view of a parameter"
            ):
                engine(inputs(rank(), 0))


@pytest.mark.parametrize("name", RECIPES)
def test_trains_as_stage_0_and_as_plain_pytorch(name: str) -> None:
    on_ranks(2, trains, name)


@pytest.mark.parametrize("zero", [{"stage": 3}, {"stage": 3, "units": ["Block"], "keep_gathered": True}])
def test_views_without_a_root_unit(zero: dict[str, Any]) -> None:
    on_ranks(2, without_a_root, zero)


def test_an_output_outlives_a_step() -> None:
    on_ranks(2, kept_over_a_step)


def test_an_object_that_holds_a_parameter() -> None:
    on_ranks(2, keeps_whole_once)


def test_what_cannot_be_replaced_is_refused_by_name() -> None:
    on_ranks(2, refused)
    on_ranks(2, leaked)
