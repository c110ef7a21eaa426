"""Files and folders of a checkpoint: what lasts when a call returns, and errors that name the file and the remedy."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

import torch
import xxhash

from partita.errors import PartitaError

REMEDIES = {
    errno.ENOSPC: "make room there, lower checkpoint.keep, or name a folder on a larger disk",
    errno.EDQUOT: "make room in this user's quota, or name a folder on another disk",
    errno.EACCES: "name a folder in which this user may write",
    errno.EPERM: "name a folder in which this user may write",
    errno.EROFS: "name a folder on a filesystem that is not read-only",
    errno.ENOTDIR: "name a folder",
    errno.EEXIST: "another run writes into the folder: give each run one of its own",
    errno.ENOENT: "it was removed: keep others out of the folder, or load an earlier checkpoint",
}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """System errors as errors of a checkpoint's file.

    Raises:
        PartitaError: names the file, what the system says and what to do.
    """
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "see the system's log (`dmesg`), or name a folder on another disk")
        raise PartitaError(f"checkpoint: '{path}': {error.strerror or error}; {remedy}") from error


def damaged(path: Path) -> PartitaError:
    return PartitaError(f"checkpoint: '{path}' is damaged: it is not what was written; load an earlier checkpoint")


def cut_off(path: Path, num_bytes: int, expected: int) -> PartitaError:
    """A file that ends too soon."""
    return PartitaError(
        f"checkpoint: '{path}' ends at byte {num_bytes} of at least {expected}: it was cut off; load an earlier "
        "checkpoint"
    )


def inside(folder: Path, name: str) -> str:
    """A file's name that an index gives.

    Raises:
        PartitaError: it leads out of the checkpoint's folder.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise PartitaError(
            f"checkpoint: the index of '{folder}' names '{name}', which is outside the folder: nothing of it was "
            "loaded; use checkpoints of those whom you trust"
        )
    return name


def checksum(content: bytes | memoryview) -> str:
    """Of a record, or of a small file."""
    return xxhash.xxh3_64(content).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_small(path: Path, content: bytes) -> None:
    """A new small file, which is there whole or not at all, and lasts when this returns."""
    aside = path.with_name(f"{path.name}.new")
    with explained(path):
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)


def read_small(path: Path) -> bytes:
    with explained(path):
        return path.read_bytes()


def read_range(path: Path, offset: int, num_bytes: int) -> memoryview:
    """Bytes of a file.

    Raises:
        PartitaError: there are fewer.
    """
    into: memoryview = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy().data
    with explained(path), open(path, "rb", buffering=0) as file:
        read_into(into, num_bytes, file.fileno(), path, offset)
    return into


def read_into(memory: memoryview, num_bytes: int, file: int, path: Path, offset: int) -> None:
    """Read at least ``num_bytes`` from a place in an open file. Raises as :func:`read_range` does."""
    done = 0
    while done < num_bytes:
        moved = os.preadv(file, [memory[done:]], offset + done)
        if not moved:
            raise cut_off(path, offset + done, offset + num_bytes)
        done += moved
