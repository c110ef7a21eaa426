"""Checkpoints that earlier versions wrote load, and training continues from them with the same bits.

``earlier/format_1.tar.xz`` has, for each name, a checkpoint that two ranks wrote after step 2, and a file with its
configuration and the model's state dicts at that step (``saved``) and one step later (``later``).
"""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

ARCHIVE = Path(__file__).parent / "earlier" / "format_1.tar.xz"
BASE = {"optimizer": {"name": "adamw", "lr": 0.01}}
WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        output: Tensor = self.norm(x)
        return output


def state(engine: partita.Engine) -> dict[str, Tensor]:
    with engine.gathered():
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def continues(folder: str, name: str, zero: dict[str, Any] | None) -> None:
    """Load a checkpoint, under its own configuration or another ``zero`` section."""
    known = torch.load(f"{folder}/{name}.pt", weights_only=True)
    config = BASE | known["config"] | ({} if zero is None else {"zero": zero})
    with partita.initialize(Net(), config) as engine:
        engine.load(f"{folder}/{name}")
        same(state(engine), known["saved"])
        if zero is None:
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(20 + rank()))
            engine.backward(engine(batch).float().square().mean())
            engine.step()
            same(state(engine), known["later"])


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{name}: {(found[name].double() - value.double()).abs().max()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(where, filter="data")
    return str(where)


@pytest.mark.parametrize("name", ["plain", "residuals", "momentum"])  # not "lean": 16-bit rounding has changed since
def test_training_continues_with_the_same_bits(folder: str, name: str) -> None:
    on_ranks(2, continues, folder, name, None, with_group=False)


@pytest.mark.parametrize(
    ("name", "ranks", "zero"), [("plain", 4, {"stage": 3}), ("lean", 2, {"stage": 3}), ("lean", 1, {"stage": 0})]
)
def test_other_ranks_load_it(folder: str, name: str, ranks: int, zero: dict[str, Any]) -> None:
    on_ranks(ranks, continues, folder, name, zero, with_group=False)
