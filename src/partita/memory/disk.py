"""The disk as a tier of memory: one scratch file per rank, in regions that are read and written asynchronously.

- The file has no name, so the system frees its space when the process ends, even if it is killed.
- A region's space is reserved before it is written, at the start (``provide``) or by ``reserve``: a full disk is
  reported before data is lost.
- Requests to one region run in order, requests to different regions in parallel.
- Data bypasses the page cache (O_DIRECT), which would otherwise fill the memory that this tier frees.
"""

import errno
import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from partita.config.schema import Offload
from partita.errors import PartitaError
from partita.memory.accelerator import HOST
from partita.memory.step_events import span
from partita.memory.streams import Event, Workers

# O_DIRECT requires offsets, sizes and addresses in multiples of the device's block: 512 or 4096 bytes.
ALIGNMENT = 4096
BLOCK_BYTES = 8 * 2**20
IN_MEMORY = ("tmpfs", "ramfs")

REMEDIES = {
    errno.ENOENT: "create the folder, or set zero.offload.path to another",
    errno.ENOTDIR: "set zero.offload.path to a folder",
    errno.EACCES: "set zero.offload.path to a folder in which this user may write",
    errno.EPERM: "set zero.offload.path to a folder in which this user may write",
    errno.EROFS: "set zero.offload.path to a folder on a filesystem that is not read-only",
    errno.ENOSPC: "free space there, or set zero.offload.path to a folder on a larger disk",
    errno.EDQUOT: "free space in this user's quota, or set zero.offload.path to a folder on another disk",
    errno.EFBIG: "raise the limit of the file size (`ulimit -f unlimited`), or offload less to the disk",
    errno.EIO: "see the system's log (`dmesg`): the disk may be failing; set zero.offload.path to another disk",
}


@dataclass(frozen=True)
class Region:
    """A range of the file; both ends are multiples of ``ALIGNMENT``."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class DiskReport:
    """The bytes read and written; ``busy_s`` counts the seconds in which at least one request was in flight."""

    bytes_read: int = 0
    bytes_written: int = 0
    busy_s: float = 0.0

    def since(self, earlier: "DiskReport") -> "DiskReport":
        """Return the traffic after ``earlier``."""
        return DiskReport(
            self.bytes_read - earlier.bytes_read,
            self.bytes_written - earlier.bytes_written,
            self.busy_s - earlier.busy_s,
        )

    def __str__(self) -> str:
        moved = self.bytes_read + self.bytes_written
        speed = f" ({moved / 1e9 / self.busy_s:.2f} GB/s)" if self.busy_s else ""
        read, written = self.bytes_read / 1e9, self.bytes_written / 1e9
        return f"disk: {read:.3f} GB read, {written:.3f} GB written, busy for {self.busy_s:.1f} s{speed}"


class Disk:
    """A scratch file in ``folder``.

    Tensors are flat, on the CPU, and page-aligned (see :mod:`partita.memory.allocate`). A request keeps their memory
    alive until it is done; their values must not change until then. An event's ``wait`` blocks the caller, even if
    there is an accelerator. After a failed request every later one to its region fails until the region is released.

    Args:
        name: the name of the file while it is created; differs between ranks.
        threads: the maximum number of blocks of ``BLOCK_BYTES`` in flight.

    Raises:
        PartitaError: the folder is missing or is not a folder, is not writable, or has no space.
    """

    def __init__(self, folder: Path, name: str, *, threads: int = 4) -> None:
        if sys.platform != "linux":
            raise PartitaError(f"offload to disk runs on Linux, not on {sys.platform}: offload to the host instead")
        self._folder = folder
        try:
            self._file, self.direct = _open(folder, name)
        except OSError as error:
            raise _failure(error, "creating a scratch file", folder) from error
        self._close = weakref.finalize(self, os.close, self._file)
        self._close.atexit = False  # threads may be writing, and the descriptor must not be reused for another file
        self._workers = Workers("disk", threads)
        self._num_bytes = 0  # of the file
        self._reserved_bytes = 0  # of its regions
        self._sparse = False
        self._free: dict[int, list[Region]] = defaultdict(list)
        self._meter = _Meter()

    def report(self) -> DiskReport:
        return self._meter.report()

    def provide(self, num_bytes: int) -> None:
        """Reserve the space of later regions, so that a full disk is reported now.

        Raises:
            PartitaError: the disk does not have the space.
        """
        if (end := self._reserved_bytes + in_pages(num_bytes)) > self._num_bytes:
            self._grow(end)

    def reserve(self, num_bytes: int) -> Region:
        """Return a region for ``num_bytes``, whose content is undefined until it is written.

        Raises:
            PartitaError: the disk does not have the space.
        """
        num_bytes = in_pages(num_bytes)
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        self.provide(num_bytes)
        region = Region(self._reserved_bytes, num_bytes)
        self._reserved_bytes += num_bytes
        return region

    def release(self, region: Region) -> None:
        """Let a later ``reserve`` of the same size return the region; waits until the requests to it are done."""
        self._workers.forget(region)
        self._free[region.num_bytes].append(region)

    def read(self, region: Region, into: Tensor) -> Event:
        """Start reading the beginning of a region into a tensor that is no larger; returns at once."""
        return self._request(region, into, self._read)

    def write(self, region: Region, values: Tensor) -> Event:
        """Start writing the values to the beginning of a region; returns at once."""
        return self._request(region, values, self._write)

    def close(self) -> None:
        """Wait for all requests, ignoring their errors, and free the file's space."""
        self._workers.close()
        self._close()

    def _grow(self, end: int) -> None:
        num_bytes = end - self._num_bytes
        try:
            os.posix_fallocate(self._file, self._num_bytes, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                os.ftruncate(self._file, self._num_bytes)  # some of it may have been reserved
                raise _failure(error, f"reserving {num_bytes} bytes", self._folder) from error
            if not self._sparse:
                self._sparse = True
                warnings.warn(
                    f"the filesystem of '{self._folder}' cannot reserve space: a full disk will raise in a step, not "
                    "at the start; set zero.offload.path to a folder on a local disk",
                    stacklevel=3,
                )
            os.ftruncate(self._file, end)
        self._num_bytes = end

    def _request(self, region: Region, tensor: Tensor, move: Callable[[memoryview, int], None]) -> Event:
        assert self._close.alive, "the disk is closed"
        memory = _memory(tensor)
        assert len(memory) <= region.num_bytes, f"{len(memory)} bytes for a region of {region.num_bytes}"
        starts = range(0, max(len(memory), 1), BLOCK_BYTES)
        blocks = [partial(move, memory[start : start + BLOCK_BYTES], region.offset + start) for start in starts]
        return self._workers.run(region, blocks)

    def _read(self, block: memoryview, offset: int) -> None:
        full, remainder, page = _split(block)
        self._move(os.preadv, "reading", [full, page], offset)
        remainder[:] = page[: len(remainder)]
        self._meter.add(bytes_read=len(block))

    def _write(self, block: memoryview, offset: int) -> None:
        full, remainder, page = _split(block)
        page[: len(remainder)] = remainder
        self._move(os.pwritev, "writing", [full, page], offset)
        self._meter.add(bytes_written=len(block))

    def _move(self, call: Callable[..., int], what: str, views: list[memoryview], offset: int) -> None:
        """Repeat a read or write as long as the system moves fewer bytes than requested."""
        num_bytes, done = sum(map(len, views)), 0
        try:
            with self._meter.busy(), span("disk", what):
                while views := [view for view in views if view]:
                    moved = call(self._file, views, offset + done)
                    if not moved:
                        raise OSError(errno.EIO, "the file ends before the region")
                    done += moved
                    views = list(_without_first(views, moved))
            if not self.direct:
                os.posix_fadvise(self._file, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _failure(error, f"{what} {num_bytes} bytes at offset {offset}", self._folder) from error


class _Meter:
    """The traffic of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._bytes_written = 0
        self._busy_s = 0.0
        self._num_busy = 0
        self._since = 0.0

    def report(self) -> DiskReport:
        with self._lock:
            now_s = time.monotonic() - self._since if self._num_busy else 0.0
            return DiskReport(self._bytes_read, self._bytes_written, self._busy_s + now_s)

    def add(self, bytes_read: int = 0, bytes_written: int = 0) -> None:
        with self._lock:
            self._bytes_read += bytes_read
            self._bytes_written += bytes_written

    @contextmanager
    def busy(self) -> Iterator[None]:
        with self._lock:
            if not self._num_busy:
                self._since = time.monotonic()
            self._num_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_busy -= 1
                if not self._num_busy:
                    self._busy_s += time.monotonic() - self._since


def _memory(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's bytes, which keeps the memory alive."""
    assert tensor.device == HOST, f"a tensor on {tensor.device}"
    assert tensor.is_contiguous(), "the tensor is not contiguous"
    assert tensor.data_ptr() % ALIGNMENT == 0, "the tensor is not page-aligned: allocate it with memory.allocate"
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def in_pages(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to full pages."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _split(block: memoryview) -> tuple[memoryview, memoryview, memoryview]:
    """Return the full pages of a block, the remainder, and a page-sized bounce buffer for the remainder."""
    num_full = len(block) // ALIGNMENT * ALIGNMENT
    full, remainder = block[:num_full], block[num_full:]
    return full, remainder, memoryview(mmap.mmap(-1, ALIGNMENT) if remainder else bytearray())


def _without_first(views: list[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Yield the views without their first ``num_bytes``."""
    for view in views:
        skipped = min(num_bytes, len(view))
        num_bytes -= skipped
        yield view[skipped:]


def scratch_folder(offload: Offload) -> Path:
    """Return the folder of the disk tier."""
    return Path(offload.path or tempfile.gettempdir())


def open_disk(offload: Offload, rank: int) -> Disk:
    """Open the disk tier of a rank; rank 0 warns if the folder is not on a disk."""
    folder = scratch_folder(offload)
    if rank == 0 and (filesystem := filesystem_in_memory(folder)):
        warnings.warn(
            f"offload to disk, in '{folder}': the filesystem there is {filesystem}, whose files are in memory, so "
            "offloading frees no memory; set zero.offload.path to a folder on a disk",
            stacklevel=2,
        )
    return Disk(folder, f"partita-rank-{rank}")


def filesystem_in_memory(folder: Path) -> str | None:
    """Return the type of the folder's filesystem if its files are in memory; None otherwise."""
    try:
        device = folder.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    name = f"{os.major(device)}:{os.minor(device)}"
    types = (line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == name)
    return next((found for found in types if found in IN_MEMORY), None)


def _open(folder: Path, name: str) -> tuple[int, bool]:
    """Return the descriptor of a new file, and True if it bypasses the page cache."""
    try:
        file = _open_unnamed(folder, name, os.O_DIRECT)
        try:
            page = mmap.mmap(-1, ALIGNMENT)
            os.pwritev(file, [page], 0)
            os.preadv(file, [page], 0)
            return file, True
        except OSError:
            os.close(file)
            raise
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    warnings.warn(
        f"the filesystem of '{folder}' does not support O_DIRECT requests of {ALIGNMENT} bytes: offload to disk uses "
        "the page cache, which is slower and takes memory; set zero.offload.path to a folder on a local disk",
        stacklevel=3,
    )
    return _open_unnamed(folder, name, 0), False


def _open_unnamed(folder: Path, name: str, flags: int) -> int:
    flags |= os.O_RDWR
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # O_TMPFILE is not supported by filesystem or kernel
            raise
    path = folder / name
    path.unlink(missing_ok=True)  # of a process that was killed between the next two calls
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        path.unlink(missing_ok=True)


def _failure(error: OSError, what: str, folder: Path) -> PartitaError:
    try:
        system = os.statvfs(folder)
        free = f"{system.f_bavail * system.f_frsize} bytes are free"
    except OSError:
        free = "its free space is unknown"
    remedy = REMEDIES.get(error.errno or 0, "set zero.offload.path to a folder on another disk")
    return PartitaError(f"offload to disk, in '{folder}' ({free}): {what} failed: {error.strerror}; {remedy}")
