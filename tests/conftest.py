"""For every test: leave no processes, threads or environment variables behind."""

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

# No test measures time; what is tried is random while developing, and always the same in continuous integration.
hypothesis.settings.register_profile("partita", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("partita")

seeds.chosen()

# torch asks for the name of each address that it connects to, 127.0.0.1 too. Where no name server answers, a test waits
# for a second rather than five, and once.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


# Tests that take five seconds or more, by id or by function: `make test` leaves them to `make test-all`, except those
# that are the only ones of a file or a feature.
SLOW = Path(__file__).with_name("slow.txt")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that are named as slow as thorough."""
    slow = set(SLOW.read_text().splitlines())
    for item in items:
        if item.nodeid in slow or item.nodeid.partition("[")[0] in slow:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """What was imported until now stays: no collection of garbage need look at it again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which random numbers were drawn."""
    seed = f"{seeds.VARIABLE}={seeds.chosen()}"
    terminalreporter.write_line(f"seed: {seeds.chosen()} ({seed} in the environment draws the same numbers again)")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test that leaves child processes, non-daemon threads or environment variables behind fails."""
    before = Snapshot.take()
    yield
    leaks = before.leaks(exempt=own_processes)
    before.restore(exempt=own_processes)
    assert not leaks, "the test left behind: " + ", ".join(leaks)


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """8 MiB of memory as a disk. (Where mounting is not permitted, the tests that replace system calls remain.)"""
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
