"""Capacities of this process that the system reports: cores, and the free bytes of each memory."""

import os
import sys
from pathlib import Path

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
    """Return the bytes of memory that this process may use (a container's limit counts), and how many are free."""
    sizes = _meminfo()
    total = sizes.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = sizes.get("MemAvailable", total)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        return limit, min(free, limit - (used or 0) + _reclaimable())
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


def _reclaimable() -> int:
    """Return the bytes of the container's page cache, which the system frees on demand."""
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines)
    return {name: int(amount.split()[0]) * 1024 for name, amount in pairs}


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
