"""A Ray job, as its driver runs it: python -m tests.integrations.ray.job FOLDER STAGE [STEP OF RANK 1'S DEATH].

Prints, as JSON, what its workers have noted and what Ray has kept.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.nn import functional as F

import partita
from partita.integrations.ray import PartitaTorchConfig, report, resume

NUM_STEPS = 6
EVERY = 2


def train(job: dict[str, Any]) -> None:
    """Steps 0 to NUM_STEPS - 1; every loss goes into a file of the rank's."""
    logging.getLogger("partita").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    config = {"zero": {"stage": job["stage"]}, "communication": {"timeout_s": 60.0}}
    with partita.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)) as engine:
        restored = resume(engine)
        rank = engine.mesh.rank
        for step in range(restored.step if restored else 0, NUM_STEPS):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = F.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            with (Path(job["folder"]) / f"losses-{rank}").open("a") as file:
                file.write(json.dumps([step, loss.item()]) + "\n")
            if step == job["dies_at"] and rank == 1 and restored is None:
                ray.train.get_all_reported_checkpoints()  # Ray has heard of what was reported
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            if (step + 1) % EVERY == 0:
                report(engine, {"step": step})


def run(folder: Path, stage: int, dies_at: int | None) -> dict[str, Any]:
    """The losses of each rank, in the order in which they came, and the steps of the checkpoints that Ray kept."""
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "stage": stage, "dies_at": dies_at},
        torch_config=PartitaTorchConfig(),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    kept = [sorted(path.name for path in Path(saved.path).iterdir()) for saved, _ in result.best_checkpoints]
    losses = [[json.loads(line) for line in (folder / f"losses-{rank}").read_text().splitlines()] for rank in range(2)]
    return {"losses": losses, "kept": kept, "metrics": result.metrics}


def main() -> None:
    """Start a small Ray of its own, run the job, and end it."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # paths of sockets are short
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            _temp_dir=temporary,
            log_to_driver="--logs" in sys.argv,
            configure_logging=False,
        )
        try:
            numbers = [int(text) for text in sys.argv[2:] if text.isdigit()]
            found = run(Path(sys.argv[1]), numbers[0], numbers[1] if len(numbers) > 1 else None)
        finally:
            ray.shutdown()
    print(json.dumps(found))  # noqa: T201  (it is what the job is asked for)


if __name__ == "__main__":
    main()
