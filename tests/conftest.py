"""For every test: leave no processes, threads or environment variables behind."""

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.hygiene import Snapshot
from tests.local import pool

# No test measures time; what is tried is random while developing, and always the same in continuous integration.
hypothesis.settings.register_profile("partita", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("partita")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """A test that leaves child processes, non-daemon threads or environment variables behind fails."""
    before = Snapshot.take()
    yield
    leaks = before.leaks(exempt=pool.own_processes)
    before.restore(exempt=pool.own_processes)
    assert not leaks, "the test left behind: " + ", ".join(leaks)
