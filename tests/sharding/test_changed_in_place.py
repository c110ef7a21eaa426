"""Outputs and inputs of units that are changed in place, especially views, which then get a new autograd node."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.models import WIDTH, inputs
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import Recipe, check

SAMPLES, POSITIONS = 2, 3


class Layers(nn.Module):
    """``[samples, positions, WIDTH]`` to the same shape. The output, of a linear layer with a bias, is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class OwnWeights(nn.Module):
    """A unit without submodules, whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.up) @ self.down
        return y.flatten(0, 1).unflatten(0, x.shape[:2])


class Residual(nn.Module):
    """Adds to the output of each block in place: ``x += h``."""

    def __init__(self, kind: type[nn.Module] = Layers) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(4)])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        for block in self.blocks:
            x = block(h)
            x += h
            h = x
        return self.last(h)


class Many(Residual):
    """Makes several kinds of in-place changes, one after the other."""

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        x = self.blocks[0](h)
        x[:, 0] = 0
        h = torch.relu_(self.blocks[1](x))
        y = self.blocks[2](h).transpose(0, 1)
        y.mul_(2).add_(1)
        z = self.blocks[3](y)
        z[0] = z[1] * 2
        z[1, 1:] = h[0, 1:2]
        return self.last(z)


class WritesInput(nn.Module):
    """Changes its input in place before and after it is read, with its own parameters, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.full((WIDTH,), 0.9)), nn.Parameter(torch.zeros(WIDTH))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(self.scale)
        y = torch.sin(x.clone() @ self.mix)
        x += y * self.shift
        x += y
        return x


class Chained(Residual):
    """Passes each block's output to the next block, unchanged."""

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


class Collects(Residual):
    """Writes the outputs of the blocks into one tensor. Each block reads a copy of the previous slice."""

    def forward(self, h: Tensor) -> Tensor:
        collected = torch.zeros(len(self.blocks) + 1, *h.shape)
        collected[0] = self.first(h)
        for number, block in enumerate(self.blocks):
            collected[number + 1] = block(collected[number].clone())
        return self.last(collected).sum(0)


class Containers(Residual):
    """Changes the outputs of its blocks in place: dicts with two halves of one tensor."""

    class Halves(Layers):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return {"left": y[..., : WIDTH // 2], "right": y[..., WIDTH // 2 :]}

    def __init__(self) -> None:
        super().__init__(Containers.Halves)

    def forward(self, h: Tensor) -> Tensor:
        h = self.first(h)
        for block in self.blocks:
            halves = block(h)
            halves["left"] += h[..., : WIDTH // 2]
            halves["right"].mul_(0.5)
            h = torch.cat([halves["right"], halves["left"]], -1)
        return self.last(h)


class Late(Residual):
    """Changes outputs in place from the second step on, in which units are prefetched."""

    def __init__(self) -> None:
        super().__init__(OwnWeights)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            return super().forward(h)
        h = self.first(h)
        for block in self.blocks:
            h = block(h) + h
        return self.last(h)


def in_three_dims(model: Any, rank: int, step: int) -> Tensor:
    return model(inputs(rank, step, SAMPLES, POSITIONS, WIDTH)).square().mean()


def changed_output(model: Any, rank: int, step: int) -> Tensor:
    """Change the model's own output in place, and return its mean square."""
    output = model(inputs(rank, step, SAMPLES, POSITIONS, WIDTH))
    output += 1
    output[:, 0] *= 2
    return output.square().mean()


MODELS: dict[str, Recipe] = {
    "residual": Recipe(Residual, in_three_dims),
    "own weights": Recipe(lambda: Residual(OwnWeights), in_three_dims),
    "many": Recipe(Many, in_three_dims),
    "input": Recipe(lambda: Chained(WritesInput), in_three_dims),
    "collects": Recipe(Collects, in_three_dims),
    "containers": Recipe(Containers, in_three_dims),
    "late": Recipe(Late, in_three_dims, plain=False),
    "output": Recipe(Residual, changed_output),
}
SHARDED = {"0": ZERO["0"], "3": ZERO["3"], "3-kept": ZERO["3-kept"]}
HIERARCHICAL = {"0": ZERO["0"], "hierarchical": {"stage": 3, "hierarchical": True}}


def trains(name: str) -> None:
    check(MODELS[name], SHARDED)


def trains_hierarchically(name: str) -> None:
    check(MODELS[name], HIERARCHICAL)


def trains_recomputed(name: str) -> None:
    recipe = MODELS[name]
    recomputed = Recipe(recipe.build, recipe.loss, config={"activations": {"checkpoint": "units"}}, plain=recipe.plain)
    check(recomputed, SHARDED)


def multi_view_says_so() -> None:
    """Check that PyTorch's error for in-place changes of outputs of ``chunk`` reaches the user."""

    class Chunks(Residual):
        def forward(self, h: Tensor) -> Tensor:
            left, _ = super().forward(h).chunk(2, -1)
            left += 1
            return left

    with pytest.raises(RuntimeError, match="returns multiple views"):
        check(Recipe(Chunks, in_three_dims), SHARDED)


@pytest.mark.parametrize("name", MODELS)
def test_trains_as_stage_0_and_as_plain_pytorch(name: str) -> None:
    on_ranks(2, trains, name)


def test_with_a_second_shard() -> None:
    on_ranks(2, trains_hierarchically, "residual")


@pytest.mark.parametrize("name", ["residual", "many", "containers"])
def test_recomputed_units(name: str) -> None:
    on_ranks(2, trains_recomputed, name)


def test_what_pytorch_forbids_stays_forbidden() -> None:
    on_ranks(2, multi_view_says_so)
