"""Errors for libraries that are not installed: they name the library and the extra that installs it."""

import importlib
import sys
from unittest import mock

import pytest

from partita import PartitaError
from partita.integrations.extras import require

NEEDED = (("lightning", "lightning", "lightning"), ("ray", "ray", "ray"), ("huggingface", "hf", "accelerate"))


@pytest.mark.parametrize(("name", "extra", "library"), NEEDED)
def test_a_missing_library_is_named_with_its_extra(name: str, extra: str, library: str) -> None:
    package = f"partita.integrations.{name}"
    with mock.patch.dict(sys.modules, {library: None}):
        sys.modules.pop(package, None)
        with pytest.raises(PartitaError, match=rf"{package} needs '{library}', .*: pip install 'partita\[{extra}\]'"):
            importlib.import_module(package)


def test_an_installed_library_is_enough() -> None:
    require("partita.integrations.lightning", "lightning", "torch")
