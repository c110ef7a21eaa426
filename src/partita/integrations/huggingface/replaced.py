"""A name of another library's module, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """A name of a module stands for another value inside."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
