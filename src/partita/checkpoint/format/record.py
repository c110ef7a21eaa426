"""The byte layout of a rank's file: consecutive records of values, each framed as ``torch.save`` does.

torch.distributed.checkpoint reads each piece of a tensor as a separate archive. The archive of a tensor is its values
between a head and a tail that depend only on dtype and shape. So the values can be written between them without
``torch.save``, and read without ``torch.load``.
"""

import io
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor

from partita.checkpoint.backend import Value
from partita.checkpoint.serializable import object_bytes
from partita.memory.collector import collector_paused

# Records begin at multiples of this, as values do inside torch's archives.
ALIGNMENT = 64
_one_at_a_time = threading.Lock()
# An offset in a file, and the bytes at it.
Part = tuple[int, Tensor]


@dataclass(frozen=True)
class Frame:
    """The bytes before and after the values of a record."""

    head: bytes
    tail: bytes


class _Recorder:
    """A writable file that keeps everything written to it except the values at an address."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.parts = [io.BytesIO()]
        self._at = (address, num_bytes)

    def write(self, data: memoryview) -> int:
        if len(data) == self._at[1] and numpy.frombuffer(data, numpy.uint8).ctypes.data == self._at[0]:
            self.parts.append(io.BytesIO())
        else:
            self.parts[-1].write(data)
        return len(data)

    def flush(self) -> None:
        pass


@lru_cache(maxsize=4096)
def frame_of(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """Return the frame of a contiguous tensor. If the tensor is empty, the tail is the full archive.

    The frame has no CRC of the values, because the checkpoint has its own checksums.
    """
    tensor = torch.empty(sizes, dtype=dtype, device="cpu")
    if not tensor.numel():
        return Frame(b"", object_bytes(tensor))
    recorder = _Recorder(tensor.data_ptr(), tensor.nbytes)
    with _without_crc():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    head, tail = (part.getvalue() for part in recorder.parts)
    assert len(head) % ALIGNMENT == 0, "torch.save no longer aligns the values"
    return Frame(head, tail)


def read_tensor(record: memoryview, head_bytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """Return the values of a framed record, as a view."""
    num_elements = torch.Size(sizes).numel()
    if not num_elements:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(record, dtype=dtype, count=num_elements, offset=head_bytes).view(sizes)


@contextmanager
def _without_crc() -> Iterator[None]:
    with _one_at_a_time:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


@dataclass(frozen=True)
class Record:
    """The location of a value in a file: ``num_bytes`` from ``offset``. The values begin after ``head_bytes``."""

    value: Value
    offset: int
    num_bytes: int
    head_bytes: int


class BoxLayout:
    """The locations of boxes in a file, one after the other from its beginning. It depends on the boxes only."""

    @collector_paused()
    def __init__(self, values: Sequence[Value]) -> None:
        self.values = list(values)
        self.records = list[Record]()
        self.num_bytes = 0
        for value in values:
            assert value.box is not None
            frame = frame_of(value.dtype, value.box.sizes)
            num_bytes = len(frame.head) + value.box.num_elements * value.dtype.itemsize + len(frame.tail)
            self.records.append(Record(value, _aligned(self.num_bytes), num_bytes, len(frame.head)))
            self.num_bytes = self.records[-1].offset + num_bytes


class FileLayout:
    """The layout of a complete file: boxes, then all other values."""

    def __init__(self, boxes: BoxLayout, others: Sequence[Value]) -> None:
        self.boxes = boxes
        self.records = list(boxes.records)
        self.num_bytes = boxes.num_bytes
        self.others = list[Part]()  # the values after the boxes
        for value in others:
            content = object_bytes(value.value)
            self.records.append(Record(value, _aligned(self.num_bytes), len(content), 0))
            self.num_bytes = self.records[-1].offset + len(content)
            self.others.append((self.records[-1].offset, _bytes(content)))

    def parts(self, tensors: Iterator[Tensor]) -> Iterator[Part]:
        """Yield the parts of the file, in order. ``tensors``: the flat values of each box."""
        for (head, tail), record, tensor in zip(self._frames(), self.boxes.records, tensors, strict=True):
            yield head
            assert tensor.nbytes == tail[0] - head[0] - record.head_bytes, record
            yield record.offset + record.head_bytes, tensor.view(torch.uint8)
            yield tail
        yield from self.others

    def frame_parts(self) -> Iterator[Part]:
        """Return the heads and tails of all boxes, in order."""
        return itertools.chain.from_iterable(self._frames())

    def _frames(self) -> Iterator[tuple[Part, Part]]:
        """Yield the head and the tail of each box, with their offsets."""
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
