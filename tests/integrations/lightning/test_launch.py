"""Scripts whose processes Lightning starts itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.thorough
def test_processes_that_lightning_starts(tmp_path: Path) -> None:
    found = set()
    for start_method in ("popen", "spawn"):
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "integrations" / "lightning" / "fit.py", start_method],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        found.update(re.findall(r"norm [0-9.]+", done.stdout))
    assert len(found) == 1  # the same weights, in the script's own process
