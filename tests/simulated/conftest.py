"""Fixtures that build the simulated accelerator once per machine, and end the processes that computed on it."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.kit.ranks import close_pool
from tests.simulated.device import build


@pytest.fixture(scope="session")
def built() -> None:
    """Build the extension, whose file is cached in build/, which git ignores."""
    if shutil.which("c++") is None:
        reason = "there is no C++ compiler to build the simulated accelerator with"
        if os.environ.get("PARTITA_REQUIRE_KERNELS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    build()


@pytest.fixture(autouse=True)
def own_processes(built: None) -> Iterator[None]:
    """Start and end with an empty pool of processes.

    A process that uses the simulated device cannot use another accelerator, and a process that has run a backward
    without the device cannot run one on it.
    """
    close_pool()
    yield
    close_pool()
