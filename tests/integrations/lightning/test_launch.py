"""Scripts whose processes Lightning starts itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comm.test_launchers import free_port

ROOT = Path(__file__).parents[3]


def started(folder: Path, start_method: str, num_nodes: int, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "integrations" / "lightning" / "fit.py", start_method, str(num_nodes)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def norms(processes: list[subprocess.Popen[str]], per_node: int) -> set[str]:
    """Return the weight norms that the processes print; check their number of ranks per node."""
    found = set()
    for process in processes:
        said, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors
        assert f"{per_node} on a node" in said
        found.update(re.findall(r"norm [0-9.]+", said))
    return found


@pytest.mark.thorough
def test_processes_that_lightning_starts(tmp_path: Path) -> None:
    """Both start methods leave the same weights in the script's own process."""
    found = norms([started(tmp_path, "popen", 1)], 2)
    found |= norms([started(tmp_path, "spawn", 1)], 1)  # the script's process is not a rank
    assert len(found) == 1


@pytest.mark.thorough
def test_nodes_that_lightning_knows_of(tmp_path: Path) -> None:
    """A script that is started on each of two nodes trains one model."""
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    nodes = [started(tmp_path, "popen", 2, NODE_RANK=str(node), **meet) for node in range(2)]
    assert len(norms(nodes, 1)) == 1
