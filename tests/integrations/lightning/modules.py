"""LightningModules, and Trainers that fit them on partita or on Lightning's own DDP."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from partita.integrations.lightning import PartitaStrategy

WIDTH = 8
BATCH = 4
NUM_SAMPLES = 36  # 9 batches on one rank and 5 on two: the last step of an epoch has one micro-batch of two
STAGES = (0, 1, 2, 3)

# Warnings that Lightning and its dependencies cause themselves.
NOISE = (
    "ignore:::lightning[.]",
    "ignore:.*LeafSpec.*",
    "ignore:::torchao[.]",
    "ignore:.*Enum subclass.*",
)


@contextmanager
def quietly() -> Iterator[None]:
    """Silence Lightning's logs, and restore the environment that it changes, because tests share a process."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "partita")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Seeded(nn.Linear):
    """A linear layer whose initial values depend only on its shape."""

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(self.in_features + self.out_features)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)


class Net(nn.Module):
    """Network from [batch, WIDTH] to [batch, 1], with a parameter at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.Sequential(*[nn.Sequential(Seeded(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
        self.head = Seeded(WIDTH, 1)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x * self.scale))

    def penalty(self) -> Tensor:
        """Return a penalty on the root's parameter, which is used outside forward."""
        return 1e-3 * self.scale.square().sum()


class Regression(pl.LightningModule):
    """Regression that records every training loss, and the learning rate after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))  # not part of `net`, and not used in forward
        self.net = Net()
        self.losses, self.rates = list[float](), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]) + self.bias, batch[1])

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("trained", loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("held_out", self.loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], number: int) -> None:
        self.log("tested", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self(batch[0])

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        """Return an optimizer with two groups, and a schedule whose first rate is not the optimizer's."""
        decayed = [param for param in self.parameters() if param.dim() > 1]
        others = [param for param in self.parameters() if param.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 + 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Regression):
    """Manual optimization: clip and step after every second batch, and step the schedule once per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.bias

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        if number % 2 == 0:
            optimizer.zero_grad()
        loss = super().training_step(batch, number)
        with optimizer.toggle_model(sync_grad=number % 2 == 1):
            self.manual_backward(loss / 2)
        if number % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()  # type: ignore[union-attr]


class Plateau(Regression):
    """A schedule that depends on a metric, and a hook that clips gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "held_out"}}

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class OfTheConfig(Regression):
    """A module that leaves the optimizer to the strategy's config."""

    def configure_optimizers(self) -> None:
        return None


def loader(batch: int = BATCH) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)


def on_partita(stage: int, **config: Any) -> PartitaStrategy:
    return PartitaStrategy({"zero": {"stage": stage}, **config}, cluster_environment=TorchElasticEnvironment())


def on_ddp() -> DDPStrategy:
    return DDPStrategy(cluster_environment=TorchElasticEnvironment())


def trainer(strategy: PartitaStrategy | DDPStrategy, devices: int, **arguments: Any) -> pl.Trainer:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "devices": devices, "max_epochs": 2, "enable_checkpointing": False, **quiet}
    return pl.Trainer(strategy=strategy, **{**defaults, **arguments})


def worst(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))
