"""The ledger of bytes by state and tier, which the allocating code records; they are not estimates."""

import resource
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from partita.memory import accelerator
from partita.memory.disk import DiskReport
from partita.table.residence import Tier

STATES = ("parameters", "gradients", "feedback", "momentum", "outer", "master", "moments")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank, by state and tier, now and at their peak.

    ``held`` and ``peak`` are keyed by (state, tier). The model states are ``parameters``, ``gradients``, ``feedback``
    (error-feedback residuals), ``momentum`` (the averaged momentum of 1-bit Adam, equal on all ranks), ``outer`` (the
    outer optimizer of DiLoCo), ``master`` (only if it is not the parameter itself) and ``moments``. The other states
    are the ``buffer_pool`` for unsharded parameters, the ``buckets`` of gradients, the ``sums`` of gradients that leave
    the device for another tier, ``staging`` memory on the host, the ``codes`` of quantized parameters, the
    ``activations`` that are offloaded or sharded, the activations of units that skip recomputation (``kept_whole``),
    and unsharded parameters that graphs made inside ``engine.gathered`` refer to (``gathered``).
    ``process_bytes`` is the resident set of the process (its peak: ``process_peak_bytes``); ``device_bytes`` and
    ``device_peak_bytes`` are those of the device's allocator (0 on CPU). ``disk`` is the traffic of the disk tier so
    far (None: nothing is stored there).
    """

    held: dict[tuple[str, str], int]
    peak: dict[tuple[str, str], int]
    process_bytes: int
    process_peak_bytes: int
    device_bytes: int = 0
    device_peak_bytes: int = 0
    disk: DiskReport | None = None

    @property
    def model_state_bytes(self) -> int:
        """Bytes of the model states (:data:`STATES`) in all tiers."""
        return sum(num for (state, _), num in self.held.items() if state in STATES)

    @property
    def total_bytes(self) -> int:
        return sum(self.held.values())

    def __str__(self) -> str:
        lines = [f"{'state':<14}{'tier':<8}{'MB now':>12}{'MB peak':>12}"]
        for key in sorted(self.peak, key=lambda k: -self.peak[k]):
            lines.append(f"{key[0]:<14}{key[1]:<8}{self.held.get(key, 0) / 1e6:>12.3f}{self.peak[key] / 1e6:>12.3f}")
        lines.append(f"{'process':<22}{self.process_bytes / 1e6:>12.3f}{self.process_peak_bytes / 1e6:>12.3f}")
        if self.device_peak_bytes:
            lines.append(
                f"{'device allocator':<22}{self.device_bytes / 1e6:>12.3f}{self.device_peak_bytes / 1e6:>12.3f}"
            )
        if self.disk is not None:
            lines.append(str(self.disk))
        return "\n".join(lines)


@dataclass
class Ledger:
    """Bytes by state and tier. ``add`` and ``remove`` are called where memory is allocated and freed."""

    _held: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    _peak: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, state: str, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        key = (state, tier.value)
        self._held[key] += num_bytes
        self._peak[key] = max(self._peak[key], self._held[key])

    def remove(self, state: str, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        key = (state, tier.value)
        assert self._held[key] >= num_bytes, f"more bytes of {state} freed than allocated"
        self._held[key] -= num_bytes

    def set(self, state: str, num_bytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Replace the bytes of a state."""
        self.remove(state, self._held[state, tier.value], tier)
        self.add(state, num_bytes, tier)

    def report(self, device: torch.device, disk: DiskReport | None = None) -> MemoryReport:
        now, peak = process_memory()
        device_bytes, device_peak_bytes = accelerator.allocated_bytes(device)
        return MemoryReport(
            held={key: num for key, num in self._held.items() if num},
            peak=dict(self._peak),
            process_bytes=now,
            process_peak_bytes=peak,
            device_bytes=device_bytes,
            device_peak_bytes=device_peak_bytes,
            disk=disk,
        )


def process_memory() -> tuple[int, int]:
    """Return the resident bytes of this process, now and at their peak (now: 0 if the system does not report them)."""
    sizes = {"VmRSS:": 0, "VmHWM:": 0}
    try:
        with open("/proc/self/status") as status:
            for line in status:
                name, *rest = line.split()
                if name in sizes:
                    sizes[name] = int(rest[0]) * 1024
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return sizes["VmRSS:"], sizes["VmHWM:"]
