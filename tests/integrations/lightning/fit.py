"""A script that Lightning starts processes for: fit.py {popen, spawn}. Prints the norm of the weights after the fit."""

import sys

import lightning.pytorch as pl
import torch

from partita.integrations.lightning import PartitaStrategy
from tests.integrations.lightning.modules import Regression, loader

if __name__ == "__main__":
    module = Regression()
    strategy = PartitaStrategy({"zero": {"stage": 3}}, start_method=sys.argv[1])  # type: ignore[arg-type]
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, enable_progress_bar=False)
    trainer.fit(module, loader())
    if sys.argv[1] == "popen":
        strategy.engine.close(whole=True)
    norm = torch.stack([param.detach().norm() for param in module.parameters()]).norm()
    if trainer.is_global_zero:
        print(f"steps {trainer.global_step}, norm {norm.item():.6f}")  # noqa: T201
