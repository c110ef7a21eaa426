"""Libraries that are not installed are named, with the extra that brings them."""

import importlib
import sys
from unittest import mock

import pytest

from partita import PartitaError
from partita.integrations.extras import require

EXTRAS = ("lightning", "ray")


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_library_is_named_with_its_extra(extra: str) -> None:
    package = f"partita.integrations.{extra}"
    with mock.patch.dict(sys.modules, {extra: None}):
        sys.modules.pop(package, None)
        with pytest.raises(PartitaError, match=rf"{package} needs '{extra}', .*: pip install 'partita\[{extra}\]'"):
            importlib.import_module(package)


def test_an_installed_library_is_enough() -> None:
    require("torch", "lightning")
