"""Loops with Fabric, alike on partita and on Lightning's own DDP."""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from partita.integrations.lightning.fabric import PartitaStrategy
from tests.integrations.lightning.modules import WIDTH


class Net(nn.Module):
    """[batch, WIDTH] to a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x * self.scale))

    def penalty(self) -> Tensor:
        """Of a parameter of the module's own, outside its forward."""
        return 1e-3 * self.scale.square().sum()


def fabric(strategy: Strategy, devices: int, **arguments: Any) -> Fabric:
    logging.getLogger("partita").setLevel(logging.ERROR)
    strategy.cluster_environment = TorchElasticEnvironment()  # type: ignore[attr-defined]
    made = Fabric(accelerator="cpu", strategy=strategy, devices=devices, **arguments)
    made.launch()
    return made


def on_partita(stage: int, **config: Any) -> PartitaStrategy:
    return PartitaStrategy({"zero": {"stage": stage}, **config})


def on_ddp() -> DDPStrategy:
    return DDPStrategy()


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))
    return x, x.sum(1, keepdim=True)


class Loop:
    """A model in training: two micro-batches to a step, clipped."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.losses = fabric, list[float]()
        model = Net()
        self.model, self.optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        self.model.mark_forward_method("penalty")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.1 + 1 / (1 + step))

    def run(self, start: int, stop: int) -> list[float]:
        """The loss of every micro-batch of these steps."""
        for step in range(start, stop):
            self.optimizer.zero_grad()
            for micro in range(2):
                x, y = batch(self.fabric.global_rank, 2 * step + micro)
                with self.fabric.no_backward_sync(self.model, enabled=micro == 0):
                    loss = F.mse_loss(self.model(x), y) + self.model.penalty()
                    self.fabric.backward(loss / 2)
                self.losses.append(loss.item())
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            self.optimizer.step()
            self.schedule.step()
        return self.losses

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": 3}

    def save(self, folder: Path) -> None:
        self.fabric.save(folder, self.state())
