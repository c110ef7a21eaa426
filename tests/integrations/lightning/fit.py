"""A script whose processes Lightning starts, two ranks in all: ``fit.py {popen, spawn} NODES``.

It prints how many ranks share a node, and the norm of the weights after the fit.
"""

import sys

import lightning.pytorch as pl
import torch

from partita.config.launchers import launch_environment
from partita.integrations.lightning import PartitaStrategy
from tests.integrations.lightning.modules import Regression, loader

if __name__ == "__main__":
    module = Regression()
    strategy = PartitaStrategy({"zero": {"stage": 3}}, start_method=sys.argv[1])  # type: ignore[arg-type]
    num_nodes = int(sys.argv[2])
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2 // num_nodes,
        num_nodes=num_nodes,
        max_epochs=1,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader())
    per_node = launch_environment(running=(trainer.global_rank, trainer.world_size)).local_world_size
    if sys.argv[1] == "popen":
        strategy.engine.close(whole=True)
    norm = torch.stack([param.detach().norm() for param in module.parameters()]).norm()
    if trainer.local_rank == 0:
        print(f"{per_node} on a node, steps {trainer.global_step}, norm {norm.item():.6f}")  # noqa: T201
