"""The simulated accelerator is built once for a machine, and ends with the processes that computed on it."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.kit.ranks import close_pool
from tests.simulated.device import build


@pytest.fixture(scope="session")
def built() -> None:
    """The extension is there: its file is kept in build/, which git ignores."""
    if shutil.which("c++") is None:
        reason = "there is no C++ compiler to build the simulated accelerator with"
        if os.environ.get("PARTITA_REQUIRE_KERNELS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    build()


@pytest.fixture(autouse=True)
def own_processes(built: None) -> Iterator[None]:
    """What computes on the device has no other accelerator any more, and what has run a backward without it cannot on
    it: no other test may have these processes.
    """
    close_pool()
    yield
    close_pool()
