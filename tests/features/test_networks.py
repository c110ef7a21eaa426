"""The loops of docs/networks.md run on two ranks, and train as they do in plain PyTorch."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit.ranks import on_ranks

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"
SHARED, *LOOPS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


class PlainEma:
    """The average of `engine.ema` in plain PyTorch."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.params, self.decay = list(module.parameters()), decay
        self.averages = [param.detach().clone() for param in self.params]

    def update(self) -> None:
        for average, param in zip(self.averages, self.params, strict=True):
            average.lerp_(param.detach(), 1 - self.decay)

    def swap(self) -> None:
        for number, param in enumerate(self.params):
            param.data, self.averages[number] = self.averages[number], param.data

    @contextmanager
    def applied(self) -> Iterator[None]:
        self.swap()
        yield
        self.swap()


class Plain:
    """The interface of an engine in plain PyTorch."""

    mesh = None

    def __init__(self, module: nn.Module, config: dict[str, Any], **_: Any) -> None:
        self.module = module
        self.averages = list[PlainEma]()
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=config["optimizer"]["lr"], weight_decay=0.01)

    def __call__(self, *args: Tensor) -> Tensor:
        result: Tensor = self.module(*args)
        return result

    def __enter__(self) -> "Plain":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gathered(self, *, modify: bool = False) -> mock.MagicMock:
        return mock.MagicMock()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        for average in self.averages:
            average.update()

    def ema(self, decay: float) -> PlainEma:
        self.averages.append(PlainEma(self.module, decay))
        return self.averages[-1]

    def close(self) -> None:
        pass


def weights(loop: str, library: Any) -> list[Tensor]:
    """Run a loop of the page with equal data on all ranks. Return its score, if any, and all networks' weights."""
    names: dict[str, Any] = {}
    engines = []

    def initialize(*args: Any, **kwargs: Any) -> Any:
        engines.append(library(*args, **kwargs))
        if library is not Plain:
            closes, engine = engines[-1].close, engines[-1]
            engine.close = lambda: closes(whole=True)
        return engines[-1]

    torch.manual_seed(0)
    exec(SHARED, names)
    names["partita"] = SimpleNamespace(initialize=initialize)
    exec(loop, names)
    modules = [engine.module for engine in engines] + [names[name] for name in ("target",) if name in names]
    if library is not Plain:
        for engine in engines:
            engine.close()
    scores = [names[name] for name in ("score",) if isinstance(names.get(name), Tensor)]
    return scores + [param.detach().clone() for module in modules for param in module.parameters()]


def trains_as_plain_pytorch(number: int) -> None:
    found = weights(LOOPS[number], partita.initialize)
    torch.testing.assert_close(found, weights(LOOPS[number], Plain), rtol=1e-6, atol=1e-6)


def test_the_page_has_its_loops() -> None:
    assert len(LOOPS) == 4


@pytest.mark.parametrize("number", range(len(LOOPS)))
def test_a_loop_of_the_page_trains_as_plain_pytorch(number: int) -> None:
    on_ranks(2, trains_as_plain_pytorch, number)
