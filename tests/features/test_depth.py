"""A model with many units trains and is saved at every stage, over shared memory and over the network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from tests.kit.ranks import on_ranks

NUM_BLOCKS = 200
NUM_STEPS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() / NUM_BLOCKS


def train_and_save(within_node: str, folder: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Train and save at each stage. Return the losses and the final weights of each."""
    results = []
    for stage in range(4):
        zero = {"stage": stage, "units": ["Block"]}
        config: dict[str, Any] = {"zero": zero, "communication": {"within_node": within_node, "timeout_s": 10}}
        torch.manual_seed(0)
        with partita.initialize(nn.Sequential(*[Block() for _ in range(NUM_BLOCKS)]), config) as engine:
            losses = []
            for step in range(NUM_STEPS):
                loss = engine(torch.full((2, 2), step + 1.0)).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            engine.save(folder / str(stage))
            results.append((losses, engine.state_dict()))
    return results


@pytest.mark.parametrize("within_node", ["memory", pytest.param("network", marks=pytest.mark.thorough)])
def test_two_hundred_blocks(within_node: str, tmp_path: Path) -> None:
    for results in on_ranks(2, train_and_save, within_node, tmp_path):
        for losses, weights in results:
            assert losses == results[0][0]
            assert losses[1] != losses[0]
            assert all(torch.equal(weight, results[0][1][name]) for name, weight in weights.items())
