"""The bytes of one value in a checkpoint's file: what ``torch.save`` writes, taken apart around the values.

torch.distributed.checkpoint reads each piece of a tensor as an archive of its own. The archive of a tensor is its
values between a head and a tail that depend on dtype and shape alone, so the values can be put between them without
passing through ``torch.save`` (and be read without ``torch.load``).
"""

import io
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from partita.errors import PartitaError

# Records begin at multiples of it, as torch begins the values inside an archive.
ALIGNMENT = 64
_one_at_a_time = threading.Lock()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)


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
    if 0 in sizes:
        return Frame(b"", object_bytes(torch.empty(sizes, dtype=dtype, device="cpu")))
    tensor = torch.empty(sizes, dtype=dtype, device="cpu")
    recorder = _Recorder(tensor.data_ptr(), tensor.nbytes)
    with _without_crc():
        torch.save(tensor, recorder)  # type: ignore[arg-type]
    head, tail = (part.getvalue() for part in recorder.parts)
    assert len(head) % ALIGNMENT == 0, "torch.save no longer aligns the values"
    return Frame(head, tail)


def object_bytes(value: Any) -> bytes:
    """The record of anything that is no tensor of a parameter's shape."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def read_object(record: bytes | memoryview) -> Any:
    """What :func:`object_bytes` was given; of plain values, containers and tensors only."""
    return torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)


def read_tensor(record: memoryview, head_bytes: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> Tensor:
    """The values of a framed record, as a view."""
    num_elements = torch.Size(sizes).numel()
    if not num_elements:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(record, dtype=dtype, count=num_elements, offset=head_bytes).view(sizes)


def plain(value: Any, where: str) -> Any:
    """``value`` as a checkpoint can give it back: mappings as dictionaries, numpy's numbers as Python's.

    Raises:
        PartitaError: ``where``, or something in it, is of a class that cannot be read back.
    """
    try:
        return _plain(value, where)
    except RecursionError:
        raise PartitaError(
            f"checkpoint: {where} is nested too deeply, or holds itself: expected numbers, text, tensors, or lists and "
            "dictionaries of them"
        ) from None


def _plain(value: Any, where: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, numpy.generic) and type(value.item()) in _PLAIN:
        return value.item()
    if isinstance(value, Mapping):
        found = {_plain(key, f"a key of {where}"): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        return Counter(found) if isinstance(value, Counter) else found
    if isinstance(value, list | tuple | set):
        kind = type(value) if type(value) in (list, tuple, set) else list
        return kind(_plain(item, f"{where}[{place}]") for place, item in enumerate(value))
    if not _is_readable(value):
        raise PartitaError(
            f"checkpoint: {where} is of {type(value).__module__}.{type(value).__qualname__}, which could not be loaded "
            "again: expected numbers, text, tensors, or lists and dictionaries of them"
        )
    return value


def _is_readable(value: Any) -> bool:
    try:
        read_object(object_bytes(value))
    except Exception:  # whatever the value's class or torch raise, it is refused
        return False
    return True


@contextmanager
def _without_crc() -> Iterator[None]:
    with _one_at_a_time:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)
