"""Description of the machine that a result was measured on."""

import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from partita.memory.capacity import host_memory, usable_cores


def describe_machine() -> str:
    """Return processor, cores, memory, versions and date, in one line."""
    gpu = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}; " if torch.cuda.is_available() else ""
    return (
        f"{gpu}{processor()}, {usable_cores()} cores, {host_memory()[0] / 2**30:.0f} GiB; "
        f"{platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}; {datetime.now(UTC).date()}"
    )


def processor() -> str:
    """Return the processor's name from the operating system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
