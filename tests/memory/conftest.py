"""Fixtures of the disk tier, with blocks so small that small tensors have many."""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from partita.memory import allocate as allocating
from partita.memory import disk as module
from partita.memory.allocate import Mapping
from partita.memory.disk import Disk
from tests.memory.scratch import BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, "rank0")
    yield disk
    disk.close()


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list["weakref.ref[Mapping]"]:
    """Return a list that collects weak references to all new mappings."""
    made: list[weakref.ref[Mapping]] = []

    def watched(num_bytes: int) -> Mapping:
        mapping = Mapping(num_bytes)
        made.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(allocating, "Mapping", watched)
    return made
