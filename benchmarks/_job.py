"""The job of `make train`, with changes."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks._common import ROOT
from partita.observe.metrics import METRICS_FILE, HeldOutRow, TrainRow, read_metrics

JOB = ROOT / "examples" / "train_stdlib.yaml"
QUICK = ("train.steps=20", "train.eval_every=20", "engine.schedule.warmup_steps=5")
TIMEOUT_S = 1200


def run_job(changes: Iterable[str], *, quick: bool) -> tuple[list[TrainRow], list[HeldOutRow]]:
    """Run the job on two processes; return the metrics of its steps and of its evaluations.

    Args:
        changes: settings that differ, as ``partita train --set`` takes them.
        quick: 20 steps.

    Raises:
        subprocess.CalledProcessError: the job failed; its output is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "partita.cli.main", "train", str(JOB), "--processes", "2"]
        for change in (f"train.out={folder}", *changes, *(QUICK if quick else ())):
            command += ["--set", change]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            done.check_returncode()
        return read_metrics(Path(folder) / METRICS_FILE)
