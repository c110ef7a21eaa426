"""Where everything is in a rank's file: values in records, one after the other, each framed as torch.save does."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.checkpoint.record import ALIGNMENT, frame_of, object_bytes
from partita.memory.collector import collector_paused
from partita.plan.box import Box

# Of a record: it is read and checked whole, so that no more memory than that is needed for it.
MOST_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Value:
    """What one record holds: a ``box`` of the global tensor called ``key``, or (without a box) any ``value``."""

    key: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8
    box: Box | None = None
    value: Any = None


def most_elements(dtype: torch.dtype) -> int:
    """Of a box that is one record."""
    return max(1, MOST_BYTES // dtype.itemsize)


@dataclass(frozen=True)
class Record:
    """A value's place in a file: ``num_bytes`` from ``offset``, of which the values begin after ``head_bytes``."""

    value: Value
    offset: int
    num_bytes: int
    head_bytes: int


class Placing:
    """Where the values of boxes are in a file, one after the other from its beginning. The same as long as they are."""

    @collector_paused()
    def __init__(self, values: Sequence[Value]) -> None:
        self.values, self.records, self.num_bytes = list(values), list[Record](), 0
        for value in values:
            assert value.box is not None
            frame = frame_of(value.dtype, value.box.sizes)
            num_bytes = len(frame.head) + value.box.num_elements * value.dtype.itemsize + len(frame.tail)
            self.records.append(Record(value, _aligned(self.num_bytes), num_bytes, len(frame.head)))
            self.num_bytes = self.records[-1].offset + num_bytes


class FileLayout:
    """A whole file: boxes, and after them any other values."""

    def __init__(self, placing: Placing, others: Sequence[Value]) -> None:
        self.placing, self.num_bytes = placing, placing.num_bytes
        self._contents = [object_bytes(value.value) for value in others]
        self._others = list[Record]()
        for value, content in zip(others, self._contents, strict=True):
            self._others.append(Record(value, _aligned(self.num_bytes), len(content), 0))
            self.num_bytes = self._others[-1].offset + len(content)

    @property
    def records(self) -> list[Record]:
        return self.placing.records + self._others

    def parts(self, tensors: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """(offset, bytes) of everything in the file, in order; ``tensors``: the values of each box, flat."""
        for (head, tail), record, tensor in zip(self._frames(), self.placing.records, tensors, strict=True):
            yield head
            assert tensor.nbytes == tail[0] - head[0] - record.head_bytes, record
            yield record.offset + record.head_bytes, tensor.view(torch.uint8)
            yield tail
        yield from self.others()

    def _frames(self) -> Iterator[tuple[tuple[int, Tensor], tuple[int, Tensor]]]:
        """What stands before and behind the values of each box."""
        for record in self.placing.records:
            assert record.value.box is not None
            frame = frame_of(record.value.dtype, record.value.box.sizes)
            end = record.offset + record.num_bytes - len(frame.tail)
            yield (record.offset, _bytes(frame.head)), (end, _bytes(frame.tail))

    def around(self) -> Iterator[tuple[int, Tensor]]:
        """(offset, bytes) of what stands around the values of boxes."""
        return itertools.chain.from_iterable(self._frames())

    def others(self) -> Iterator[tuple[int, Tensor]]:
        """(offset, bytes) of what comes after the boxes."""
        for record, content in zip(self._others, self._contents, strict=True):
            yield record.offset, _bytes(content)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
