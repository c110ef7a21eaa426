"""Weights from safetensors files: every rank reads only what it stores."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import partita
from partita import ConfigError
from partita.huggingface.weights import Weights
from partita.table.box import Box
from partita.table.span import QUANTUM
from tests.kit.models import WIDTH
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights

OFFLOADS = ({}, {"parameters": "host"}, {"parameters": "disk", "optimizer": "disk"})


class Shapes(nn.Module):
    """Parameters of 0 to 4 dims, among them a channels-last, a small, an empty and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.randn(0, 3))
        self.cube = nn.Parameter(torch.randn(53, 7, 3))
        self.table = nn.Embedding(313, 9)
        self.head = nn.Linear(9, 313)
        self.head.weight = self.table.weight
        self.convolution = nn.Conv2d(6, 10, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(10)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count reads from now on. Returns a list that gets the number of elements of each read."""
    numbers, read = list[int](), Weights.read

    def count(self: Weights, name: str, box: Box | None = None) -> Tensor:
        tensor = read(self, name, box)
        numbers.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Weights, "read", count)
    return numbers


def in_parts(file: Path, offload: dict[str, str], meta: bool) -> tuple[int, int]:
    """Return the number of elements that this rank read, and the number of those that belong to buffers."""
    saved = load_file(file)
    with torch.device("meta" if meta else "cpu"):
        model = Shapes()
    with pytest.MonkeyPatch.context() as patch:
        numbers = counted(patch)
        engine = partita.initialize(model, {"zero": {"stage": 3, "offload": offload}}, weights=file)
    with engine:
        for name, value in whole_weights(engine).items():
            assert torch.equal(value, saved[name]), name
        assert all(torch.equal(value, saved[name]) for name, value in model.named_buffers())
    return sum(numbers), sum(buffer.numel() for buffer in model.buffers())


def differ(file: Path) -> None:
    """Check that files that differ between ranks are an error: that of rank 1 lacks a tensor."""
    weights = load_file(file)
    if rank() == 1:
        del weights["cube"]
    own = file.with_name(f"{rank()}.safetensors")
    save_file(weights, own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="rank 1 finds other tensors than rank 0"):
            partita.initialize(Shapes(), {"zero": {"stage": 3}}, weights=own)


def without_a_bias(file: Path, config: dict[str, Any]) -> None:
    """Check that a parameter which the file lacks is initialized by its module, and the others are read."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = partita.initialize(model, config, weights=file)
    with engine:
        found = engine.state_dict()
    if rank() == 0:
        assert all(torch.equal(found[name], value) for name, value in load_file(file).items())
        assert 0 < found["1.bias"].abs().max() <= WIDTH**-0.5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(torch.seed())
    weights = Shapes().state_dict()
    del weights["head.weight"]
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
@pytest.mark.parametrize("offload", OFFLOADS, ids=["device", "host", "disk"])
def test_each_rank_reads_its_part(world: int, meta: bool, offload: dict[str, str], file: Path) -> None:
    read = on_ranks(world, in_parts, file, offload, meta)
    num_elements = sum(param.numel() for param in Shapes().parameters())
    assert sum(of_rank - buffers for of_rank, buffers in read) == num_elements
    assert max(of_rank - buffers for of_rank, buffers in read) < num_elements / world + 8 * QUANTUM


def test_ranks_with_other_files_are_told(file: Path) -> None:
    on_ranks(2, differ, file)


@pytest.mark.parametrize("config", [{"zero": {"stage": 3}}, {"parallel": {"tensor": 2}}], ids=repr)
def test_a_bias_that_the_file_lacks(config: dict[str, Any], tmp_path: Path) -> None:
    weights = {
        "0.weight": torch.randn(WIDTH, WIDTH),
        "0.bias": torch.randn(WIDTH),
        "1.weight": torch.ones(WIDTH, WIDTH),
    }
    save_file(weights, tmp_path / "model.safetensors")
    on_ranks(2, without_a_bias, tmp_path / "model.safetensors", config)
