"""Comparison of compression schemes by the loss that they reach: the tasks, and one rank of a run."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from benchmarks._common import ROOT
from benchmarks._schemes import schemes
from benchmarks._started import started
from partita.config.resolve import ResolvedBatch
from partita.train.data import Batches, load_corpus
from partita.train.job import load_job
from partita.train.models import build_model

JOB = ROOT / "examples" / "train_stdlib.yaml"
# Held-out samples for the text's loss, in batches of the job's size.
HELD_OUT_BATCHES = 64
DIGITS_HELD_OUT = 360
DIGITS_BATCH = 16


class Digits(nn.Module):
    """A classifier for images of 8 x 8 pixels: two convolutions and two linear layers, 0.15M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.hidden = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        found = F.gelu(self.second(F.gelu(self.first(images))))
        return F.cross_entropy(self.head(F.gelu(self.hidden(found.flatten(1)))), labels)


@dataclass(frozen=True)
class Run:
    """One run: a task (``text``: the job of `make train`; ``digits``), the number of steps, the learning rate, and the
    compression scheme.
    """

    task: str
    scheme: str
    steps: int
    lr: float
    seed: int
    num_ranks: int

    def described(self) -> dict[str, Any]:
        """All settings on which the result depends."""
        scheme = schemes(self.steps)[self.scheme]
        sizes = {"task": self.task, "steps": self.steps, "lr": self.lr, "seed": self.seed, "ranks": self.num_ranks}
        return {**sizes, "scheme": self.scheme, "sections": scheme.sections, "forgets": scheme.forgets}


def learn(described: Mapping[str, Any]) -> dict[str, Any]:
    """Train on processes of this machine, and return the results.

    The results are the ``loss`` (nats) on held-out samples, and the ``megabytes`` that a rank sends in the complete
    run, warm-up and control messages included.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = started(
            *("benchmarks._learning", [json.dumps(described), folder], described["ranks"], Path(folder)),
            environment={"OMP_NUM_THREADS": "1"},
        )[0]
    what = f"{described['task']}, {described['scheme']}, seed {described['seed']}, rate {described['lr']:g}"
    print(f"  {what}: {found['loss']:.4f}, {found['megabytes']:.1f} MB", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Run one rank."""
    described, folder = json.loads(sys.argv[1]), sys.argv[2]
    task = {"text": _text, "digits": _digits}[described["task"]]
    with task(described) as (engine, draw, held_out):
        for step in range(described["steps"]):
            engine.backward(engine(**draw(step)))
            engine.step()
            if described["forgets"]:
                engine._parts.runtime.reducer.sync_states.clear()
        sent = engine.traffic_report().sent_bytes()
        with torch.no_grad():
            losses = [engine(**batch).item() for batch in held_out]
    Path(folder, f"{engine.mesh.rank}.json").write_text(
        json.dumps({"loss": sum(losses) / len(losses), "megabytes": sent / 1e6})
    )


def _config(described: Mapping[str, Any], common: dict[str, Any]) -> dict[str, Any]:
    own = described["sections"]
    optimizer = {**common["optimizer"], "lr": described["lr"], **own.get("optimizer", {})}
    return {**common, **own, "optimizer": optimizer}


@contextmanager
def _text(described: Mapping[str, Any]) -> Iterator[Any]:
    """Build the job of `make train`, with samples and weights drawn from the seed."""
    job = load_job(JOB, [f"model.seed={described['seed']}"])
    ready, corpus = build_model(job.model, job.data), load_corpus(job.data)
    common = job.engine.model_dump(mode="json", exclude_unset=True)
    common["schedule"]["total_steps"] = described["steps"]
    seeded = job.data.model_copy(update={"seed": described["seed"]})
    with partita.initialize(ready.module, _config(described, common)) as engine:
        mesh, batch = engine.mesh, engine.blueprint.resolved.batch
        mine = Batches(corpus, seeded, batch, mesh.rank, mesh.num_ranks, mesh.device)
        every = Batches(corpus, job.data, ResolvedBatch(batch.total, 1, batch.total), 0, 1, mesh.device)
        held_out = (ready.inputs(window) for window in every.held_out(HELD_OUT_BATCHES))
        yield engine, lambda step: ready.inputs(next(mine.train(step))), held_out


@contextmanager
def _digits(described: Mapping[str, Any]) -> Iterator[Any]:
    """Build a task on scikit-learn's images of digits, each batch shifted by up to a pixel."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RuntimeError('the digits are scikit-learn\'s: python -m pip install --editable ".[bench]"') from None

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
    labels = torch.tensor(labels)[order]
    held_out, trained = slice(None, DIGITS_HELD_OUT), slice(DIGITS_HELD_OUT, None)
    torch.manual_seed(described["seed"])
    common = {
        "optimizer": {"name": "adamw", "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup_steps": described["steps"] // 20, "total_steps": described["steps"]},
        "clip_grad_norm": 1.0,
    }
    with partita.initialize(Digits(), _config(described, common)) as engine:

        def draw(step: int) -> dict[str, Tensor]:
            place = (described["seed"] * described["steps"] + step) * engine.mesh.num_ranks + engine.mesh.rank
            generator = torch.Generator().manual_seed(place)
            chosen = torch.randint(len(labels) - DIGITS_HELD_OUT, (DIGITS_BATCH,), generator=generator)
            rows, columns = torch.randint(-1, 2, (2,), generator=generator).tolist()
            return {"images": images[trained][chosen].roll((rows, columns), (2, 3)), "labels": labels[trained][chosen]}

        yield engine, draw, [{"images": images[held_out], "labels": labels[held_out]}]


if __name__ == "__main__":
    main()
