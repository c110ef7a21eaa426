"""The bytes of one tensor in a checkpoint's file: what ``torch.save`` writes, taken apart around the values.

torch.distributed.checkpoint reads each piece of a tensor as an archive of its own. The archive of a tensor is its
values between a head and a tail that depend on dtype and shape alone, so the values can be put between them without
passing through ``torch.save`` (and be read without ``torch.load``).
"""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy
import torch
from torch import Tensor

from partita.checkpoint.plain import object_bytes

# Records begin at multiples of it, as torch begins the values inside an archive.
ALIGNMENT = 64
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Frame:
    """What stands before and after the values."""

    head: bytes
    tail: bytes


class _Recorder:
    """A file that keeps what is written but not the values at an address."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.parts, self._at = [io.BytesIO()], (address, num_bytes)

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
