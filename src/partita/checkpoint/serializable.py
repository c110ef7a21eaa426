"""Serialization of plain values: values that a checkpoint stores in addition to the model's tensors."""

import hashlib
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from partita.errors import PartitaError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
_EXPECTED = "expected numbers, text, tensors, or lists and dictionaries of them"


def object_bytes(value: Any) -> bytes:
    """Return the bytes that ``torch.save`` writes for a value."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def read_object(content: bytes | memoryview) -> Any:
    """Load a value from the bytes of :func:`object_bytes`. Only plain values, containers and tensors are loaded."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def digest(value: Any) -> str:
    """Return a digest of a plain value. Equal values have equal digests."""
    if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
        content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        parts = [str(value.dtype), str(tuple(value.shape)), hashlib.blake2b(content).hexdigest()]
    elif isinstance(value, Mapping):
        parts = sorted(digest(key) + digest(item) for key, item in value.items())
    elif isinstance(value, set):
        parts = sorted(map(digest, value))
    elif isinstance(value, list | tuple):
        parts = list(map(digest, value))
    else:
        parts = [repr(value)]
    return hashlib.blake2b(repr((type(value).__name__, parts)).encode(), digest_size=16).hexdigest()


def to_serializable(value: Any, where: str) -> Any:
    """Convert ``value`` to what a checkpoint can restore: mappings to dictionaries, numpy's numbers to Python's.

    Raises:
        PartitaError: the value, or something in it, is of a class that cannot be read back. The message names it as
            ``where``.
    """
    try:
        return _convert(value, where)
    except RecursionError:
        raise PartitaError(f"checkpoint: {where} is nested too deeply, or contains itself: {_EXPECTED}") from None


def _convert(value: Any, where: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, numpy.generic) and type(value.item()) in _PLAIN:
        return value.item()
    if isinstance(value, Mapping):
        found = {_convert(key, f"a key of {where}"): _convert(item, f"{where}[{key!r}]") for key, item in value.items()}
        return Counter(found) if isinstance(value, Counter) else found
    if isinstance(value, list | tuple | set):
        kind = type(value) if type(value) in (list, tuple, set) else list
        return kind(_convert(item, f"{where}[{place}]") for place, item in enumerate(value))
    if not _is_readable(value):
        raise PartitaError(
            f"checkpoint: {where} is of {type(value).__module__}.{type(value).__qualname__}, which could not be loaded "
            f"again: {_EXPECTED}"
        )
    return value


def _is_readable(value: Any) -> bool:
    try:
        read_object(object_bytes(value))
    except Exception:  # whatever the value's class or torch raises, the value is refused
        return False
    return True
