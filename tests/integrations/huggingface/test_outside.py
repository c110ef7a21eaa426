"""accelerate's own checks under ``partita run``: all pass except those that it refuses by design."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Checks that read `.grad` after the backward of a model prepared without an optimizer, whose gradients would not be
# reduced.
NO_OPTIMIZER = "PartitaError: accelerator.backward: the prepared RegressionModel has no optimizer yet"
# A check that compares `.grad` after each backward. Reduced gradients are in buckets, and `.grad` is no view of them.
IN_BUCKETS = "PartitaError: the .grad of 'a' has no values"
REFUSED = {
    "test_distributed_sync": NO_OPTIMIZER,
    "test_distributed_sync_multiple_fwd": NO_OPTIMIZER,
    "test_gradient_accumulation_with_opt_and_scheduler": IN_BUCKETS,
}
# A check that trains in fp32, in fp32 with split batches, in bf16 and in fp16, and compares the parameters with those
# of plain fp32 training. With `precision.compute: fp32`, bf16 is autocast as in accelerate; fp16 is refused.
NO_FP16_AUTOCAST = "ConfigError: precision.compute and the trainer's mixed precision differ ("


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 3])
def test_accelerates_own_checks(stage: int, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero": {"stage": stage}, "precision": {"compute": "fp32"}}))
    script = ("-m", "tests.integrations.huggingface.outside", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-m", "partita.cli.main", "run", "--config", str(config)]
    done = subprocess.run(
        [*command, "--processes", "2", *script],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "FP16 training check." in done.stdout
    for rank in range(2):
        outcomes = json.loads((tmp_path / f"{rank}.json").read_text())
        errors = {name: error for name, error in outcomes.items() if error}
        expected = REFUSED | {"training_check": NO_FP16_AUTOCAST}
        assert errors.keys() == expected.keys()
        for name, error in errors.items():
            assert error.startswith(expected[name]), name
        assert len(outcomes) - len(errors) >= 17
