"""Modules computed tile by tile: gradients, memory, and errors for modules that are not position-wise."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita import ConfigError, PartitaError
from tests.kit import seeds
from tests.kit.live_bytes import LiveBytes
from tests.kit.models import WIDTH, Stack

TILED = {"tiled": {"mlp": ["Mlp"]}}
RATIO = 64


class Mlp(nn.Module):
    """MLP that is much wider inside than outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, RATIO * WIDTH), nn.Linear(RATIO * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + self.inner(x)


def trained(config: dict[str, Any], *shape: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the output for inputs of a shape, and every gradient."""
    seeds.start()
    model, x = Residual(Mlp()), torch.randn(*shape, WIDTH)
    with partita.initialize(model, config) as engine:
        output = engine(x)
        engine.backward(output.square().mean())
        return output.detach(), {name: engine.gradient(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("shape", [(1, 50), (3, 50), (50,), (40, 3), (2, 2, 13), (1, 1), (0, 50), (2, 0)])
def test_outputs_and_gradients(shape: tuple[int, ...]) -> None:
    plain, tiled = trained({}, *shape), trained(TILED, *shape)
    torch.testing.assert_close(tiled[0], plain[0], rtol=1e-6, atol=1e-6)
    for name, gradient in tiled[1].items():
        torch.testing.assert_close(gradient, plain[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_what_is_inside_is_there_for_one_tile() -> None:
    """Only the module's input and output are kept; the two wide tensors inside exist for one tile of WIDTH rows."""
    x = torch.randn(1, 400, WIDTH)
    inside = 2 * WIDTH * RATIO * WIDTH * 4
    with partita.initialize(Residual(Mlp()), TILED) as engine, LiveBytes() as live:
        output = engine(x)
        scalars = 200 * 2**10  # the random state of each tile's forward, and the tile's output
        assert live.total <= 3 * x.nbytes + 400 // WIDTH * 6000
        assert live.peak <= 4 * x.nbytes + inside + 400 // WIDTH * 6000 + scalars
        output.square().mean().backward()
        parameters = 2 * (RATIO * WIDTH * WIDTH) * 4
        assert live.peak <= 8 * x.nbytes + 4 * inside + 4 * parameters
        assert live.peak < x.nbytes * RATIO


def test_without_gradients_too() -> None:
    x = torch.randn(1, 400, WIDTH)
    with partita.initialize(Residual(Mlp()), TILED) as engine, torch.no_grad(), LiveBytes() as live:
        engine(x)
        assert live.peak <= 5 * x.nbytes + 3 * WIDTH * RATIO * WIDTH * 4


def test_a_module_that_takes_a_keyword() -> None:
    class Calling(Residual):
        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.inner(x=self.first(x))
            return output

    x = torch.randn(1, 50, WIDTH)
    seeds.start()
    model = Calling(Mlp())
    expected = model(x)
    with partita.initialize(model, TILED) as engine:
        torch.testing.assert_close(engine(x), expected)


class Pair(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Summed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(-2)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Both()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x, x)
        return output


class Both(Mlp):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        (Pair, r"for a tensor of shape \(1, 16, 16\) it returned a tuple"),
        (Summed, r"for a tensor of shape \(1, 16, 16\) it returned a tensor of shape \(1, 16\)"),
        (Masked, r"it was called with a tensor of shape \(1, 50, 16\), a tensor of shape \(1, 50, 16\)"),
    ],
)
def test_modules_that_are_not_position_wise(inner: type[nn.Module], said: str) -> None:
    config = {"tiled": {"mlp": ["Both" if inner is Masked else inner.__name__]}}
    with partita.initialize(Residual(inner()), config) as engine:
        with pytest.raises(
            PartitaError, match=f"tiled.mlp: 'inner.*' does not compute each position by itself: .*{said}"
        ):
            engine(torch.randn(1, 50, WIDTH))


def test_a_pattern_that_fits_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tiled.mlp: 'mlp.\*' matches no module of Stack"):
        partita.initialize(Stack(1), {"tiled": {"mlp": ["mlp.*"]}})


def test_a_forward_that_differs_when_repeated_is_named() -> None:
    class Fickle(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Fickle.calls += 1
            return super().forward(x if Fickle.calls < 5 else x[:, :1])

    with partita.initialize(Residual(Fickle()), {"tiled": {"mlp": ["Fickle"]}}) as engine:
        loss = engine(torch.randn(1, 50, WIDTH)).square().mean()
        with pytest.raises(PartitaError, match="'inner' computed something else when its forward was recomputed"):
            engine.backward(loss)
