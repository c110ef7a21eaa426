"""Files and folders: durable writes, locks of the writing processes, and errors that name the file and the remedy."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

import torch
import xxhash

from partita.errors import PartitaError

REMEDIES = {
    errno.ENOSPC: "free disk space, lower checkpoint.keep, or name a folder on a larger disk",
    errno.EDQUOT: "free disk space in this user's quota, or name a folder on another disk",
    errno.EACCES: "name a folder in which this user may write",
    errno.EPERM: "name a folder in which this user may write",
    errno.EROFS: "name a folder on a filesystem that is not read-only",
    errno.ENOTDIR: "name a folder",
    errno.ENAMETOOLONG: "name a folder with a shorter name",
    errno.EEXIST: "another run writes into the folder: give each run its own folder",
    errno.ENOENT: "it was removed: keep other programs out of the folder, or load an earlier checkpoint",
}


@contextlib.contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Convert system errors in the block to errors about a checkpoint's file.

    Raises:
        PartitaError: names the file, the system's message and the remedy.
    """
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "see the system's log (`dmesg`), or name a folder on another disk")
        raise PartitaError(f"checkpoint: '{path}': {error.strerror or error}; {remedy}") from error


def damaged(path: Path) -> PartitaError:
    return PartitaError(
        f"checkpoint: '{path}' is damaged: it has changed since it was written; load an earlier checkpoint"
    )


def inside_folder(folder: Path, name: str) -> str:
    """Return the name of a file that an index gives, after checking that it is inside the folder.

    Raises:
        PartitaError: it is outside the checkpoint's folder.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise PartitaError(
            f"checkpoint: the index of '{folder}' names '{name}', which is outside the folder: nothing was loaded; "
            "use only checkpoints from sources that you trust"
        )
    return name


def checksum(content: bytes | memoryview) -> str:
    """Return the checksum of a record or of a small file."""
    return xxhash.xxh3_64(content).hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_small(path: Path, content: bytes) -> None:
    """Write a new small file atomically. Its content is durable on return."""
    temporary = path.with_name(f"{path.name}.new")
    with explain_os_errors(path):
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def read_small(path: Path) -> bytes:
    with explain_os_errors(path):
        return path.read_bytes()


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Open a file without the page cache. Return it, and True if the filesystem supports that."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666), hasattr(os, "O_DIRECT")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    if flags & os.O_CREAT:  # created although it was not opened
        path.unlink(missing_ok=True)
    return os.open(path, flags, 0o666), False


def read_range(path: Path, offset: int, num_bytes: int) -> memoryview:
    """Read a range of bytes of a file.

    Raises:
        PartitaError: the file has fewer bytes.
    """
    into: memoryview = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy().data
    with explain_os_errors(path), open(path, "rb", buffering=0) as file:
        read_into(into, num_bytes, file.fileno(), path, offset)
    return into


def read_into(memory: memoryview, num_bytes: int, file: int, path: Path, offset: int) -> None:
    """Read at least ``num_bytes`` from an offset in an open file. Raises the errors of :func:`read_range`."""
    done = 0
    while done < num_bytes:
        moved = os.preadv(file, [memory[done:]], offset + done)
        if not moved:
            raise PartitaError(
                f"checkpoint: '{path}' ends at byte {offset + done} of at least {offset + num_bytes}: it was cut off; "
                "load an earlier checkpoint"
            )
        done += moved


class Lock:
    """A new file that is locked until :meth:`release`, or until the process ends for any reason (over NFS as well).

    On a filesystem without locks, the file counts as locked as long as it exists.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock, also for processes that were forked meanwhile. The file stays."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        os.close(self._file)


def is_locked(path: Path) -> bool:
    """Return True if a process holds the lock, or if this cannot be determined; False if there is no such file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(file)
