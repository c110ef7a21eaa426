"""Where everything is in a rank's file: values in records, one after the other, each framed as torch.save does."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.checkpoint.backend import Value
from partita.checkpoint.format.record import ALIGNMENT, frame_of
from partita.checkpoint.plain import object_bytes
from partita.memory.collector import collector_paused

# A place in a file, and the bytes that stand there.
Part = tuple[int, Tensor]


@dataclass(frozen=True)
class Record:
    """A value's place in a file: ``num_bytes`` from ``offset``, of which the values begin after ``head_bytes``."""

    value: Value
    offset: int
    num_bytes: int
    head_bytes: int


class BoxLayout:
    """Where boxes are in a file, one after the other from its beginning. The same for as long as the boxes are."""

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

    def __init__(self, boxes: BoxLayout, others: Sequence[Value]) -> None:
        self.boxes, self.records, self.num_bytes = boxes, list(boxes.records), boxes.num_bytes
        self.others = list[Part]()  # what comes after the boxes
        for value in others:
            content = object_bytes(value.value)
            self.records.append(Record(value, _aligned(self.num_bytes), len(content), 0))
            self.num_bytes = self.records[-1].offset + len(content)
            self.others.append((self.records[-1].offset, _bytes(content)))

    def parts(self, tensors: Iterator[Tensor]) -> Iterator[Part]:
        """Everything in the file, in order; ``tensors``: the values of each box, flat."""
        for (head, tail), record, tensor in zip(self._frames(), self.boxes.records, tensors, strict=True):
            yield head
            assert tensor.nbytes == tail[0] - head[0] - record.head_bytes, record
            yield record.offset + record.head_bytes, tensor.view(torch.uint8)
            yield tail
        yield from self.others

    def around(self) -> Iterator[Part]:
        """What stands around the values of boxes."""
        return itertools.chain.from_iterable(self._frames())

    def _frames(self) -> Iterator[tuple[Part, Part]]:
        """What stands before and behind the values of each box."""
        for record in self.boxes.records:
            assert record.value.box is not None
            frame = frame_of(record.value.dtype, record.value.box.sizes)
            end = record.offset + record.num_bytes - len(frame.tail)
            yield (record.offset, _bytes(frame.head)), (end, _bytes(frame.tail))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
