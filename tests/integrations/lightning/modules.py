"""LightningModules, and fits of them: on partita, and on Lightning's own DDP beside it."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from partita.integrations.lightning import PartitaStrategy

WIDTH = 8
RELATIVE = 1e-6  # of a loss, beside DDP's


class Regression(pl.LightningModule):
    """[batch, WIDTH] to a number; notes every loss, and the rate at every step."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(WIDTH))  # of the module's own: read inside training_step
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.kind, self.losses, self.rates = optimizer, list[float](), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x * self.scale))

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = self.loss(batch) + 1e-3 * self.scale.square().sum()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("held_out", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], number: int) -> None:
        self.log("tested", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def loader(num_samples: int = 44) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(strategy: Strategy, devices: int, folder: str | None = None, **arguments: Any) -> pl.Trainer:
    """A quiet Trainer in processes that are there already."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("partita").setLevel(logging.ERROR)
    _quiet()
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary")}
    defaults = {"accelerator": "cpu", "devices": devices, "max_epochs": 2, "enable_checkpointing": False, **quiet}
    strategy.cluster_environment = TorchElasticEnvironment()  # type: ignore[attr-defined]
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **{**defaults, **arguments})


def _quiet() -> None:
    """Lightning's advice on speed is no concern of a test."""
    for text in (".*does not have many workers", ".*number of training batches"):
        warnings.filterwarnings("ignore", text)


def on_partita(stage: int, **config: Any) -> PartitaStrategy:
    return PartitaStrategy({"zero": {"stage": stage}, **config})


def on_ddp() -> DDPStrategy:
    return DDPStrategy()


def close_to(found: list[float], expected: list[float]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(abs(one - other) <= RELATIVE * abs(other) for one, other in pairs)
