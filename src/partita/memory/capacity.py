"""Capacities of this process that the system reports: cores, and the free bytes of each memory."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from partita.config.schema import Offload
from partita.errors import PartitaError
from partita.layout.budget import MemoryBudget
from partita.memory import accelerator
from partita.memory.disk import filesystem_in_memory, scratch_folder
from partita.memory.ledger import process_memory

# Shares of the free memory that states and working memory may use. The rest is reserved: on the device for activations,
# whose size is unknown before the first forward; on host and disk for other processes.
DEVICE_SHARE, HOST_SHARE, DISK_SHARE = 0.7, 0.85, 0.95


def free_budget(device: torch.device, offload: Offload) -> MemoryBudget:
    """Return the memory that a process may use, minus a margin. Host and disk are those of the entire node. The current
    values of the model count as used.

    Raises:
        PartitaError: the free space of the disk tier's folder cannot be read.
    """
    host, disk = host_memory()[1], int(DISK_SHARE * _free_disk(scratch_folder(offload)))
    if accelerator.is_host(device):
        return MemoryBudget(int(DEVICE_SHARE * host), 0, disk, one_memory=True)
    return MemoryBudget(int(DEVICE_SHARE * free_now(device)), int(HOST_SHARE * host), disk)


def free_now(device: torch.device) -> int:
    """Return the bytes of the device's memory that are free for tensors; on the CPU, the free bytes of the node."""
    accelerator.reclaim(device)
    return host_memory()[1] if accelerator.is_host(device) else accelerator.free_bytes(device)


def spare_bytes(device: torch.device) -> int:
    """Return the bytes of the device's memory that this process has not used yet, not even at its peak."""
    now, peak = process_memory() if accelerator.is_host(device) else accelerator.allocated_bytes(device)
    return max(0, free_now(device) - (peak - now))


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory that this process may use, and how many are free.

    Limits of the cgroups that it is in count: those of a container, a Slurm job or a systemd slice.
    """
    sizes = _meminfo()
    node = sizes.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    total, free = node, sizes.get("MemAvailable", node)
    for limit, unused in _limits():
        if limit < node:
            total, free = min(total, limit), min(free, unused)
    return total, free


def _free_disk(folder: Path) -> int:
    """Return the free bytes for the disk tier; 0 if this system does not support it, or for an in-memory filesystem."""
    if sys.platform != "linux" or filesystem_in_memory(folder):
        return 0
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise PartitaError(
            f"offload to disk, in '{folder}': {error.strerror}; set zero.offload.path to a folder"
        ) from error
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True)
class _MemoryController:
    """The files of a version of Linux's memory controller, and its hierarchy's folder below that of all cgroups.

    ``reclaimable``: the key in ``memory.stat`` of the page cache that the system frees on demand.
    """

    folder: str
    limit: str
    used: str
    reclaimable: str


_CGROUPS, _CGROUPS_OF_PROCESS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSION_1 = _MemoryController("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _MemoryController("", "memory.max", "memory.current", "inactive_file")


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the memory limit of each cgroup that this process is in, and the bytes that are free below that limit."""
    for line in _lines(_CGROUPS_OF_PROCESS):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        own = PurePosixPath(path.lstrip("/"))
        for group in (own, *own.parents):
            folder = _CGROUPS / files.folder / group
            limit = _number(folder / files.limit)
            if limit is not None:
                reclaimable = _values(folder / "memory.stat").get(files.reclaimable, 0)
                yield limit, limit - (_number(folder / files.used) or 0) + reclaimable


def _meminfo() -> dict[str, int]:
    return {name: 1024 * kib for name, kib in _values(Path("/proc/meminfo")).items()}


def _values(file: Path) -> dict[str, int]:
    """Return the numbers in a file of lines with a name and a number; empty without the file."""
    words = (line.split() for line in _lines(file))
    return {name.rstrip(":"): int(number) for name, number, *_ in words}


def _number(file: Path) -> int | None:
    text = "".join(_lines(file))
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
