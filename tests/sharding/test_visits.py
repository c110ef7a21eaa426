"""Units are unsharded exactly while they are in use, whatever the order in which forward and backward run them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.kit import seeds
from tests.kit.models import WIDTH, Block, Stack, inputs, square_loss
from tests.kit.plans import ZERO, matrix, sampled
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, backward, check, module_of

GROWS = "'buffer_pool' .* grows"


class Tied(nn.Module):
    """Two linear layers outside the blocks share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.decode = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for block in self.blocks:
            x = block(x)
        return self.decode(x)


class TiedBlocks(Stack):
    """Two blocks share one weight, which therefore belongs to the unit around both."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[2].up.weight = self.blocks[0].up.weight


class Repeated(Stack):
    """Calls the first two blocks several times in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.blocks[0](self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(self.blocks[1](x))


class Shuffled(Stack):
    """Runs the blocks in another order in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        order = torch.randperm(len(self.blocks), generator=seeds.generator(self.calls))
        self.calls += 1
        for number in order.tolist():
            x = self.blocks[number](x)
        return self.last(x)


class Keywords(Stack):
    """Blocks that take keyword arguments and return nested containers."""

    class Inner(Block):
        def forward(self, *, state: dict[str, Any]) -> dict[str, Any]:
            x = super().forward(state["x"])
            return {"x": x, "all": [*state["all"], (x, None)]}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Keywords.Inner() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.first(x), "all": []}
        for block in self.blocks:
            state = block(state=state)
        return self.last(sum(x for x, _ in state["all"]))


class TwoInputs(nn.Module):
    """Blocks with two outputs and two inputs, one of which is used late in forward."""

    class Joined(Block):
        def forward(self, x: Tensor, late: Tensor) -> tuple[Tensor, Tensor]:
            inner = self.up(self.norm(x))
            late = late + inner
            return x + self.down(late), late

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList([TwoInputs.Joined() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        late = self.side(x)
        x = self.first(x)
        for block in self.blocks:
            x, late = block(x, late)
        return x


class InnerLoss(Stack):
    """Blocks store an auxiliary loss of an inner activation as an attribute."""

    class Noticed(Block):
        noticed: Tensor

        def forward(self, x: Tensor) -> Tensor:
            inner = self.up(self.norm(x))
            self.noticed = inner.square().mean()
            return x + self.down(F.gelu(inner))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InnerLoss.Noticed() for _ in range(4)])


def with_inner_loss(model: Any, rank: int, step: int) -> Tensor:
    loss = square_loss(model, rank, step)
    return loss + sum(block.noticed for block in module_of(model).blocks)


def inner_loss_alone(model: Any, rank: int, step: int) -> Tensor:
    square_loss(model, rank, step)
    return module_of(model).blocks[2].noticed


def siamese(model: Any, rank: int, step: int) -> Tensor:
    one, other = model(inputs(rank, step)), model(inputs(rank, step + 100))
    return (one * other).mean()


def second_first(model: Any, rank: int, step: int) -> Tensor:
    """Run two forwards, and detach the output of the second one."""
    one, other = model(inputs(rank, step)), model(inputs(rank, step + 100))
    return one.square().mean() + 0.5 * other.detach().square().mean()


def leaf_inputs(model: Any, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step).requires_grad_()).square().mean()


def input_gradient_first(model: Any, rank: int, step: int) -> Tensor:
    x = inputs(rank, step).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.abs().sum() > 0
    return square_loss(model, rank, step)


def gradient_penalty(model: Any, rank: int, step: int) -> Tensor:
    x = inputs(rank, step).requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + gradient.square().mean()


def without_gradient_first(model: Any, rank: int, step: int) -> Tensor:
    with torch.no_grad():
        expected = model(inputs(rank, step))
    output = model(inputs(rank, step))
    assert torch.equal(output, expected)
    return output.square().mean()


def inference_first(model: Any, rank: int, step: int) -> Tensor:
    with torch.inference_mode():
        model(inputs(rank, step))
    return square_loss(model, rank, step)


def blocks_alone(model: Any, rank: int, step: int) -> Tensor:
    """Call two blocks directly, in addition to the model's forward."""
    module = module_of(model)
    return module.blocks[1](module.blocks[3](inputs(rank, step))).square().mean() + square_loss(model, rank, step)


def retained(model: Any, rank: int, step: int) -> Tensor:
    """Run a backward through part of the graph, which is retained for the second backward."""
    output = model(inputs(rank, step))
    module = module_of(model)
    (gradient,) = torch.autograd.grad(output.sum(), module.kept, retain_graph=True)
    assert gradient.isfinite().all()
    return output.square().mean()


def two_backwards(model: Any, rank: int, step: int) -> Tensor:
    """Run two forwards, and the backward of the second one first."""
    one, other = square_loss(model, rank, step), square_loss(model, rank, step + 100)
    backward(model, other)
    return one


def in_autocast(model: Any, rank: int, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs(rank, step)).float().square().mean()


def on_the_host(model: Any, rank: int, step: int) -> Tensor:
    """Run a forward whose saved tensors are moved to the host and back by hooks."""
    with torch.autograd.graph.save_on_cpu():
        return square_loss(model, rank, step)


class SharedModule(Stack):
    """Two blocks share one module."""

    def __init__(self) -> None:
        super().__init__(4)
        self.blocks[3].up = self.blocks[1].up


class Parametrized(Stack):
    """Weights that are computed from parameters, by weight norm and by spectral norm."""

    def __init__(self) -> None:
        super().__init__(3)
        for block in self.blocks:
            nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.spectral_norm(self.last)


class Lists(nn.Module):
    """Parameters of the root and of blocks in ``nn.ParameterList`` and ``nn.ParameterDict``."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])
            self.named = nn.ParameterDict({"mix": torch.randn(WIDTH, WIDTH) / 4})

        def forward(self, x: Tensor) -> Tensor:
            return x + (x @ self.named["mix"]).tanh() * self.scales[0] + self.scales[1]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Lists.Inner() for name in ("one", "two", "three")})
        self.scales = nn.ParameterList([torch.ones(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x * self.scales[0]


class OtherMethod(Stack):
    """Calls a method of a unit other than forward."""

    class Sided(Block):
        def half(self, x: Tensor) -> Tensor:
            return self.up(self.norm(x))[..., :WIDTH]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OtherMethod.Sided() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.blocks[2].half(x))


class Inner(Stack):
    """Units inside units."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(WIDTH, WIDTH)
            self.inner = nn.ModuleList([Block(), Block()])
            self.after = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            for block in self.inner:
                x = block(x)
            return x + self.after(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner.Outer() for _ in range(2)])


class KeepsInner(Stack):
    """Stores the activation between two blocks as an attribute."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == 2:
                self.kept = x
            x = block(x)
        return self.last(x)


def freeze(model: nn.Module, trains: Callable[[str], bool]) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_(trains(name))
    return model


def only_last_biases() -> nn.Module:
    return freeze(Stack(), lambda name: name.endswith("down.bias"))


def only_norms() -> nn.Module:
    return freeze(Stack(), lambda name: ".norm." in name)


def one_block_frozen() -> nn.Module:
    return freeze(Stack(), lambda name: not name.startswith("blocks.2."))


def first_half_frozen() -> nn.Module:
    return freeze(Stack(), lambda name: not name.startswith(("first", "blocks.0", "blocks.1", "blocks.2")))


def root_frozen() -> nn.Module:
    return freeze(Stack(), lambda name: name.startswith("blocks"))


RECIPES: dict[str, Recipe] = {
    "plain": Recipe(Stack),
    "plain in one bucket": Recipe(Stack, bucket_bytes=2**20),
    "no prefetch": Recipe(Stack, config={"zero": {"prefetch_bytes": 0}}, plain=False),
    "tied": Recipe(Tied),
    "tied blocks": Recipe(TiedBlocks),
    "repeated": Recipe(Repeated),
    "shuffled": Recipe(Shuffled, plain=False),
    "keywords": Recipe(Keywords),
    "two inputs": Recipe(TwoInputs),
    "inner loss": Recipe(InnerLoss, with_inner_loss),
    "inner loss alone": Recipe(InnerLoss, inner_loss_alone),
    "two backwards": Recipe(Stack, two_backwards),
    "autocast": Recipe(Stack, in_autocast, plain=False),
    "saved on the host": Recipe(Stack, on_the_host),
    "shared module": Recipe(SharedModule),
    "parametrized": Recipe(Parametrized, plain=False),
    "lists": Recipe(Lists),
    "other method": Recipe(OtherMethod, ignored="parameter .* is read outside|'buffer_pool' .* grows"),
    "units in units": Recipe(Inner, config={"zero": {"units": ["Outer", "Block"]}}),
    "siamese": Recipe(Stack, siamese),
    "one of two forwards": Recipe(Stack, second_first),
    "inputs are leaves": Recipe(Stack, leaf_inputs),
    "input gradient first": Recipe(Stack, input_gradient_first),
    "gradient penalty": Recipe(Stack, gradient_penalty, ignored=GROWS),
    "without gradient first": Recipe(Stack, without_gradient_first),
    "inference mode first": Recipe(Stack, inference_first),
    "blocks alone": Recipe(Stack, blocks_alone),
    "retained graph": Recipe(KeepsInner, retained),
    "only last biases": Recipe(only_last_biases),
    "only norms": Recipe(only_norms),
    "one block frozen": Recipe(one_block_frozen),
    "first half frozen": Recipe(first_half_frozen),
    "root frozen": Recipe(root_frozen),
}


OTHERS = ("1", "2", "3-kept")
# Recipes that differ most in the order and number of calls of their units.
SAMPLE = ("plain", "repeated", "two backwards", "one block frozen", "gradient penalty")


def run_recipe(name: str, plans: tuple[str, ...]) -> None:
    recipe = RECIPES[name]
    compared = {plan: ZERO[plan] for plan in ("0", *plans)}
    if "prefetch_bytes" in recipe.config.get("zero", {}):
        compared = {"3": ZERO["3"], "default": {"stage": 3, "prefetch_bytes": "auto"}}
    check(recipe, compared)


@pytest.mark.parametrize("name", RECIPES)
def test_trains_as_stage_0_and_as_plain_pytorch(name: str) -> None:
    on_ranks(2, run_recipe, name, ("3",))


@pytest.mark.parametrize("name", sampled(RECIPES, *SAMPLE))
def test_other_stages_train_so_too(name: str) -> None:
    on_ranks(2, run_recipe, name, OTHERS)


@matrix(name=["plain", "siamese", "only norms", "gradient penalty"], world=[1, 4], plan=("3", *OTHERS))
def test_other_numbers_of_ranks(world: int, name: str, plan: str) -> None:
    on_ranks(world, run_recipe, name, (plan,))
