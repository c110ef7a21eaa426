"""Saving and loading access storage only through a backend; the one here has no files."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.backend import Backend, Chunk, Draft, Request, Stored, StoredTensor, Value
from partita.table.mesh_shape import MeshShape
from tests.checkpoint.ranks import SHAPES, check_loaded, random_values, rank_of, save


@dataclass
class InMemory(Stored):
    """A checkpoint in memory. The offset of a chunk is an index into ``contents``."""

    contents: list[Any] = field(default_factory=list)

    def value(self, key: str) -> Any:
        return self.contents[self.values[key].offset]

    @contextmanager
    def read(self, chunks: Sequence[Chunk]) -> Iterator[Iterator[Tensor]]:
        yield (self.contents[chunk.offset] for chunk in chunks)


@dataclass
class Store(Backend):
    """A backend in memory, which all ranks share."""

    drafts: list["Part"] = field(default_factory=list)
    checkpoints: dict[Path, InMemory] = field(default_factory=dict)

    def draft(self, request: Request, token: str) -> "Part":
        self.drafts.append(Part(self, request.folder))
        return self.drafts[-1]

    def open(self, folder: Path) -> InMemory:
        return self.checkpoints[folder]


@dataclass
class Part(Draft):
    store: Store
    folder: Path
    snapshot_bytes: int = 0
    boxes: Sequence[Value] = ()
    others: Sequence[Value] = ()
    tensors: list[Tensor] = field(default_factory=list)

    def begin(self, boxes: Sequence[Value], others: Sequence[Value]) -> None:
        self.boxes, self.others = boxes, others

    def join(self) -> None:
        pass

    def snapshot(self, batches: Iterable[list[Tensor]]) -> None:
        self.tensors = [tensor.clone() for batch in batches for tensor in batch]

    def write(self, batches: Iterable[list[Tensor]] | None = None) -> None:
        if batches is not None:
            self.snapshot(batches)

    def commit(self) -> None:
        made = self.store.checkpoints[self.folder] = InMemory(self.folder, manifest={"step": 3})
        for part in self.store.drafts:
            for box, tensor in zip(part.boxes, part.tensors, strict=True):
                assert box.box is not None
                chunk = Chunk(box.key, box.box, "", len(made.contents), tensor.nbytes)
                made.tensors.setdefault(box.key, StoredTensor(box.shape, box.dtype)).chunks.append(chunk)
                made.contents.append(tensor.view(box.box.sizes))
            for other in part.others:
                made.values[other.key] = Chunk(other.key, None, "", len(made.contents), 0)
                made.contents.append(other.value)

    def leave(self, error: Exception | None = None) -> None:
        pass

    def discard(self) -> None:
        self.store.drafts.clear()


def test_another_backend() -> None:
    values, mesh, other = random_values(), MeshShape(data=3), MeshShape(data=2)
    store, zeros = Store(), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    save([rank_of(number, mesh, {}, values) for number in range(3)], [store] * 3, Path("anywhere"))
    for number in range(2):
        expected = rank_of(number, other, {}, values)
        check_loaded(rank_of(number, other, {}, zeros), expected, store.open(Path("anywhere")))
