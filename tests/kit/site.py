"""The documentation site, built once per test run by the first worker that needs it."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
import socket, sys
def refuse(*arguments): raise AssertionError(f"the build reaches for the network: {arguments}")
socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site once, without a network and with warnings as errors, and return its folder."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has its own folder inside the run's folder
        folder = folder.parent
    site, done = folder / "documentation", folder / "documentation.done"
    with open(folder / "documentation.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build = subprocess.run(
                [sys.executable, "-c", BUILD, ROOT / "mkdocs.yml", site], capture_output=True, text=True, timeout=280
            )
            assert build.returncode == 0, build.stdout + build.stderr
            done.touch()
    return site
