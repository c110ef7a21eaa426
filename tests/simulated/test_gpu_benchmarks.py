"""Tests that run the GPU benchmarks on the simulated accelerator, so that their first run on a GPU does not fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.all import PARTS
from benchmarks.gpu.timeline import device_spans

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    {script.module for scripts in PARTS.values() for script in scripts if script.module.startswith("gpu.")}
)
SHORT = ("gpu.check", "gpu.kernels")


@pytest.mark.parametrize(
    "script", [script if script in SHORT else pytest.param(script, marks=pytest.mark.thorough) for script in SCRIPTS]
)
def test_every_script_runs(script: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{script}", "--simulated"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "sim, " in done.stdout, "it ran on another device"


@pytest.mark.thorough
def test_a_part_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.all", "correct", "--simulated", "--logs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.rstrip().endswith("failed: none")
    scripts = {script.module for script in PARTS["correct"] if script.module.startswith("gpu.")}
    assert {path.stem for path in (tmp_path / "correct").iterdir()} == scripts


def test_kernels_and_copies_of_a_trace() -> None:
    """Kernels and copies are found in a trace. The trace is synthetic: only CUDA's profiler records such events."""
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 10, "dur": 5}
    copies = [
        {"ph": "X", "cat": "gpu_memcpy", "name": f"Memcpy {way} (Pinned -> Device)", "ts": at, "dur": 2}
        for at, way in enumerate(("HtoD", "DtoH", "DtoD"))
    ]
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}
    found = device_spans({"traceEvents": [kernel, *copies, host, {"ph": "M", "name": "process_name"}]})
    assert found == {"kernels": [(10, 15)], "to the device": [(0, 2)], "to the host": [(1, 3)]}
