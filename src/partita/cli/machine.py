"""What this machine has, asked of the operating system."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> tuple[int, int]:
    """Bytes of memory: all that this process may use (a container's limit counts), and what is free of it."""
    sizes = _meminfo()
    total = sizes.get("MemTotal", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = sizes.get("MemAvailable", total)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        return limit, min(free, limit - (used or 0))
    return total, free


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
