"""Traffic: calls and bytes by collective, mesh axes and purpose, counted in training or predicted by a plan."""

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class TrafficKey:
    """The key of a count. ``purpose``: parameters, gradients, updates (exchanges with the
    owners of parameters), activations, buffers, control (flags and norms), start (initialization), and others.
    """

    collective: str
    axes: tuple[str, ...]
    purpose: str


@dataclass(frozen=True)
class TrafficCount:
    calls: int = 0
    sent_bytes: int = 0

    def __add__(self, other: "TrafficCount") -> "TrafficCount":
        return TrafficCount(self.calls + other.calls, self.sent_bytes + other.sent_bytes)

    def __sub__(self, other: "TrafficCount") -> "TrafficCount":
        return TrafficCount(self.calls - other.calls, self.sent_bytes - other.sent_bytes)


@dataclass(frozen=True)
class TrafficReport:
    """The messages of one rank; ``sent_bytes`` are bytes of payload, as a ring or a direct exchange sends them."""

    rows: dict[TrafficKey, TrafficCount]

    def sent_bytes(self, purpose: str | None = None) -> int:
        """Return the bytes sent by this rank, for one purpose or for all."""
        return sum(count.sent_bytes for key, count in self.rows.items() if purpose in (None, key.purpose))

    def since(self, earlier: "TrafficReport") -> "TrafficReport":
        """Return the messages between two reports."""
        rows = {key: count - earlier.rows.get(key, TrafficCount()) for key, count in self.rows.items()}
        return TrafficReport({key: count for key, count in rows.items() if count != TrafficCount()})

    def __str__(self) -> str:
        lines = [f"{'collective':<16}{'axes':<14}{'purpose':<12}{'calls':>8}{'MB sent':>12}"]
        for key, count in sorted(self.rows.items(), key=lambda row: -row[1].sent_bytes):
            name, axes = key.collective, ",".join(key.axes)
            lines.append(f"{name:<16}{axes:<14}{key.purpose:<12}{count.calls:>8}{count.sent_bytes / 1e6:>12.3f}")
        return "\n".join(lines)


class TrafficMeter:
    """Sums traffic; thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[TrafficKey, TrafficCount] = {}
        self._lock = threading.Lock()

    def add(self, key: TrafficKey, sent_bytes: int, calls: int = 1) -> None:
        """Count ``calls`` calls that send ``sent_bytes`` in total."""
        with self._lock:
            self._rows[key] = self._rows.get(key, TrafficCount()) + TrafficCount(calls, sent_bytes)

    def report(self) -> TrafficReport:
        return TrafficReport(dict(self._rows))
