"""Pytest configuration: slow tests are marked, and a test must not leak processes, threads or environment variables."""

import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.kit import seeds
from tests.kit.hygiene import Snapshot
from tests.kit.ranks import own_processes

# No deadline: a busy machine is slow. Examples are random during development, and the same in every run of CI.
hypothesis.settings.register_profile("partita", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("partita")

seeds.chosen()

# torch resolves the host name of every address that it connects to, including 127.0.0.1. If no name server answers,
# a test waits once for a second instead of five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# Lists tests that take five seconds or more, by test id or by function. `make test` skips them and `make test-all` runs
# them. The only tests of a file or of a feature are not listed.
SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests listed in ``SLOW`` as thorough."""
    slow = set(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid in slow or item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seed of this run."""
    seed = f"{seeds.VARIABLE}={seeds.chosen()}"
    terminalreporter.write_line(f"seed: {seeds.chosen()} ({seed} in the environment draws the same numbers again)")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves child processes, non-daemon threads or environment variables behind."""
    before = Snapshot.take()
    yield
    leaks = before.leaks(exempt=own_processes)
    before.restore(exempt=own_processes)
    assert not leaks, "the test left behind: " + ", ".join(leaks)


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 8 MiB.

    Tests with this fixture are skipped if mounting is not permitted; tests that replace system calls still run.
    """
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)
