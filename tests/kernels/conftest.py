"""Fixtures for the kernels. If they were not built, their tests are skipped, or fail with PARTITA_REQUIRE_KERNELS=1."""

import importlib.util
import os

import pytest

from partita.kernels import native
from tests.kit import seeds


@pytest.fixture(autouse=True)
def fresh_inputs() -> None:
    seeds.start()


@pytest.fixture
def compiled() -> None:
    """Skip the test, or let it fail, if the compiled kernels were not built."""
    if importlib.util.find_spec("partita.kernels._native") is None:
        reason = "the compiled kernels were not built (make kernels)"
        if os.environ.get("PARTITA_REQUIRE_KERNELS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the compiled kernels, as if they could not be built, but without the warning."""
    monkeypatch.setattr(native, "module", lambda: None)
