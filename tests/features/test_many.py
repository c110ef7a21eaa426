"""The work per parameter does not depend on the number of parameters."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import partita
from tests.kit.plans import matrix
from tests.kit.ranks import on_ranks


class Scalars(nn.Module):
    """Model with ``num`` parameters of one element each, in one unit."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(num))

    def forward(self) -> Tensor:
        return torch.cat(tuple(self.values)).sum()


def num_calls(work: Callable[[], Any]) -> int:
    """Count the Python calls, and resumptions of generators, that ``work`` makes in this thread."""
    found = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def calls(config: dict[str, Any], num: int, folder: Path) -> dict[str, int]:
    engine: partita.Engine

    def start() -> None:
        nonlocal engine
        engine = partita.initialize(Scalars(num), config)

    def step() -> None:
        engine.backward(engine())
        engine.step()

    works: dict[str, Callable[[], Any]] = {
        "initialize": start,
        "first step": step,
        "step": step,
        "state_dict": lambda: engine.state_dict(),
        "save": lambda: engine.save(folder / str(num)),
        "load": lambda: engine.load(folder / str(num)),
        "export": lambda: engine.export(folder / "weights"),
        "gathered": lambda: engine.gathered(engine.module, modify=True).__enter__(),
    }
    found = {name: num_calls(work) for name, work in works.items()}
    engine.close()
    return found


@matrix(plan=["bf16", "3", "offloaded"], world=[1, 2])
def test_work_is_linear_in_the_parameters(plan: str, world: int, tmp_path: Path) -> None:
    config = {
        "bf16": {"zero": {"stage": 1}, "precision": {"compute": "bf16"}},
        "3": {"zero": {"stage": 3}},
        "offloaded": {"zero": {"stage": 2, "offload": {"optimizer": "host"}}},
    }[plan]
    config = {**config, "checkpoint": {"background": False}}
    few, many = (on_ranks(world, calls, config, num, tmp_path)[0] for num in (100, 400))
    for name, num in many.items():
        assert num < 4.5 * few[name], f"{name}: {few[name]} calls for 100 parameters, {num} for 400"
