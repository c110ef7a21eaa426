"""Temporary replacement of a name in another library's module."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a name of a module by another value inside a block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
