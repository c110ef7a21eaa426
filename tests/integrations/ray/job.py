"""The driver of a Ray job: ``python -m tests.integrations.ray.job FOLDER STAGE [STEP IN WHICH RANK 1 DIES]``.

It prints, as JSON, the losses of the workers, and the checkpoints and metrics that Ray kept.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
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


def losses_of(stage: int, dies_at: int | None, under_ray: bool = False) -> Iterator[tuple[int, float]]:
    """Train; yield (step, loss) of this rank. Rank 1 dies in step ``dies_at`` of a run that was not resumed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    config = {"zero": {"stage": stage}, "communication": {"timeout_s": 60.0}}
    with partita.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2)) as engine:
        restored = resume(engine) if under_ray else None
        for step in range(restored.step if restored else 0, NUM_STEPS):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + engine.mesh.rank))
            loss = F.mse_loss(engine(x), x.sum(1, keepdim=True))
            engine.backward(loss)
            yield step, loss.item()
            if step == dies_at and engine.mesh.rank == 1 and restored is None:
                ray.train.get_all_reported_checkpoints()  # waits until Ray has processed every report
                os.kill(os.getpid(), signal.SIGKILL)
            engine.step()
            if under_ray and (step + 1) % EVERY == 0:
                report(engine, {"step": step})


def train(job: dict[str, Any]) -> None:
    """Train on one worker; append its losses to a file."""
    logging.getLogger("partita").setLevel(logging.ERROR)
    notes = Path(job["folder"]) / f"losses-{ray.train.get_context().get_world_rank()}"
    for noted in losses_of(job["stage"], job["dies_at"], under_ray=True):
        with notes.open("a") as file:
            file.write(json.dumps(noted) + "\n")


def run(folder: Path, stage: int, dies_at: int | None) -> dict[str, Any]:
    """Run the job; return each rank's losses in order, the names of the checkpoints that Ray kept, and its metrics."""
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
    """Start a small local Ray, run the job, and shut Ray down."""
    folder, stage, *dies_at = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # socket paths must be short
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            _temp_dir=temporary,
            log_to_driver=False,
            configure_logging=False,
        )
        try:
            found = run(Path(folder), int(stage), int(dies_at[0]) if dies_at else None)
        finally:
            ray.shutdown()
    print(json.dumps(found))  # noqa: T201  (it is what the job is asked for)


if __name__ == "__main__":
    main()
