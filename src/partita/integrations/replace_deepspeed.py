"""Replacement of the package ``deepspeed``, for unchanged scripts."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder, Loader):
    """Imports ``partita.integrations.deepspeed`` as ``deepspeed``, with its submodules."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] == "deepspeed" else None

    def create_module(self, spec: ModuleSpec) -> Any:
        own = f"partita.integrations.{spec.name}"
        if importlib.util.find_spec(own) is None:
            package, _, name = own.rpartition(".")
            getattr(importlib.import_module(package), name)  # raises the error that names the alternative
            raise ModuleNotFoundError(f"No module named '{spec.name}'", name=spec.name)
        module = importlib.import_module(own)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Keep the module's own spec, which the import has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def replace_deepspeed() -> None:
    """Make ``import deepspeed`` import partita's module, whether DeepSpeed is installed or not."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
