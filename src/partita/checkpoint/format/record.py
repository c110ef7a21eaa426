"""A rank's file, byte by byte: values in records, one after the other, each framed as ``torch.save`` does.

torch.distributed.checkpoint reads each piece of a tensor as an archive of its own. The archive of a tensor is its
values between a head and a tail that depend on dtype and shape alone, so the values can be put between them without
passing through ``torch.save`` (and be read without ``torch.load``).
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
from partita.checkpoint.plain import object_bytes
from partita.memory.collector import collector_paused

# Records begin at multiples of it, as torch begins the values inside an archive.
ALIGNMENT = 64
_one_at_a_time = threading.Lock()
# A place in a file, and the bytes that stand there.
Part = tuple[int, Tensor]


@dataclass(frozen=True)
class Frame:
    """What stands before and after the values."""

    head: bytes
    tail: bytes


class _Recorder:
    """A file that keeps what is written but not the values at an address."""

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
    """The frame of a contiguous tensor; where it has no values, all that there is. It has no sums over the values: the
    checkpoint keeps its own.
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
    """The values of a framed record, as a view."""
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
    """A value's place in a file: ``num_bytes`` from ``offset``, of which the values begin after ``head_bytes``."""

    value: Value
    offset: int
    num_bytes: int
    head_bytes: int


class BoxLayout:
    """Where boxes are in a file, one after the other from its beginning. The same for as long as the boxes are."""

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
    """A whole file: boxes, and after them any other values."""

    def __init__(self, boxes: BoxLayout, others: Sequence[Value]) -> None:
        self.boxes = boxes
        self.records = list(boxes.records)
        self.num_bytes = boxes.num_bytes
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
