"""The example script, run as a user runs it. (The example jobs are read in test_job.)"""

import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def test_the_plain_script_learns_and_exports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "plain_script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.1 * losses[0]
    assert load_file(tmp_path / "runs" / "plain_script" / "model.safetensors")["0.weight"].shape == (256, 16)
