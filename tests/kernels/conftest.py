"""Kernels are tested as built; where they were not, their tests fail if PARTITA_REQUIRE_KERNELS asks for them."""

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
    """The compiled kernels are there."""
    if importlib.util.find_spec("partita.kernels._native") is None:
        reason = "the compiled kernels were not built (make kernels)"
        if os.environ.get("PARTITA_REQUIRE_KERNELS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as it is where the kernels could not be built, its warning aside."""
    monkeypatch.setattr(native, "module", lambda: None)
