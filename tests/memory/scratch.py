"""Helpers for tests of the disk tier: random memory, and filesystems that refuse requests."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from partita.memory.allocate import allocate
from partita.memory.disk import ALIGNMENT, Disk, Region

BLOCK_BYTES = 3 * ALIGNMENT

OPEN, PWRITEV = os.open, os.pwritev


def some(num_bytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a page-aligned tensor of random bits."""
    tensor = allocate(num_bytes // dtype.itemsize, dtype, torch.device("cpu"))
    tensor.view(torch.uint8).random_(0, 256)
    return tensor


def bits(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def read(disk: Disk, region: Region, like: Tensor) -> Tensor:
    into = some(like.numel() * like.itemsize, like.dtype)
    disk.read(region, into).wait()
    return into


def refuse(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Patch system calls to act like a filesystem that forces the disk into this mode.

    It has no unnamed files (``named``), or refuses O_DIRECT: at opening (``buffered``) or at the first write.
    """

    def refusing(path: Path, flags: int, *rest: int) -> int:
        if mode == "named" and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
        if mode == "buffered" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return OPEN(path, flags, *rest)

    def unaligned(file: int, views: Sequence[memoryview], offset: int) -> int:
        monkeypatch.setattr(os, "pwritev", PWRITEV)
        raise OSError(errno.EINVAL, "larger blocks, please")

    monkeypatch.setattr(os, "open", refusing)
    if mode == "buffered after a request":
        monkeypatch.setattr(os, "pwritev", unaligned)
