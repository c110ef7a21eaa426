"""A Fabric loop that runs on partita and on Lightning's own DDP."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor

from partita.integrations.lightning.fabric import PartitaStrategy
from tests.integrations.lightning.modules import WIDTH, Net


def on_partita(stage: int, **config: Any) -> PartitaStrategy:
    return PartitaStrategy({"zero": {"stage": stage}, **config}, cluster_environment=TorchElasticEnvironment())


def on_ddp() -> DDPStrategy:
    return DDPStrategy(cluster_environment=TorchElasticEnvironment())


def fabric(strategy: PartitaStrategy | DDPStrategy, devices: int, **arguments: Any) -> Fabric:
    made = Fabric(accelerator="cpu", strategy=strategy, devices=devices, **arguments)
    made.launch()
    return made


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))
    return x, x.sum(1, keepdim=True)


class Loop:
    """A training loop with two micro-batches per step and gradient clipping."""

    def __init__(self, fabric: Fabric, rate: float = 1e-2) -> None:
        self.fabric, self.losses, self.norms = fabric, list[float](), list[float]()
        model = Net()
        self.model, self.optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-3))
        self.model.mark_forward_method("penalty")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.1 + 1 / (1 + step))

    def loss(self, number: int) -> Tensor:
        x, y = batch(self.fabric.global_rank, number)
        return F.mse_loss(self.model(x), y) + self.model.penalty()

    def run(self, start: int, stop: int) -> list[float]:
        """Train; return the losses of all micro-batches so far, with the gradient norm of a step after its losses."""
        for step in range(start, stop):
            self.optimizer.zero_grad()
            for micro in range(2):
                with self.fabric.no_backward_sync(self.model, enabled=micro == 0):
                    loss = self.loss(2 * step + micro)
                    self.fabric.backward(loss / 2)
                self.losses.append(loss.item())
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)
            assert norm is not None
            self.losses.append(float(norm))
            self.optimizer.step()
            self.schedule.step()
        return self.losses

    def state(self, step: int = 0) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": step}

    def save(self, folder: Path) -> None:
        self.fabric.save(folder, self.state(step=3))
