"""The Triton kernels have the bits of the reference, here in Triton's interpreter, which runs them on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import seeds

ROOT = Path(__file__).parents[2]
# `make` installs Triton in its own folder: next to the other packages, some of them would behave as on a GPU.
TRITON = Path(sys.prefix) / "triton"


def test_the_bits_of_the_reference() -> None:
    if not TRITON.exists():
        reason = f"Triton is not in {TRITON} (make test installs it)"
        if os.environ.get("PARTITA_REQUIRE_KERNELS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    path = os.pathsep.join([*sys.path, str(TRITON)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", str(seeds.chosen())],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
