"""What travelled: calls and bytes by collective, mesh axis and purpose."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class TrafficKey:
    """``purpose`` says what for: parameters, gradients, buffers, control (flags and norms), start (initialization)."""

    collective: str
    axes: tuple[str, ...]
    purpose: str


@dataclass(frozen=True)
class TrafficCount:
    calls: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True)
class TrafficReport:
    """What this rank sent so far; ``sent_bytes`` are bytes of payload, as a ring or a direct exchange sends them."""

    rows: dict[TrafficKey, TrafficCount]

    def sent_bytes(self, purpose: str | None = None) -> int:
        """Bytes sent by this rank, for one purpose or for all."""
        return sum(count.sent_bytes for key, count in self.rows.items() if purpose in (None, key.purpose))

    def since(self, earlier: "TrafficReport") -> "TrafficReport":
        """What was sent between two reports."""
        rows = {}
        for key, count in self.rows.items():
            before = earlier.rows.get(key, TrafficCount())
            if count != before:
                rows[key] = TrafficCount(count.calls - before.calls, count.sent_bytes - before.sent_bytes)
        return TrafficReport(rows)

    def __str__(self) -> str:
        lines = [f"{'collective':<16}{'axes':<14}{'purpose':<12}{'calls':>8}{'MB sent':>12}"]
        for key, count in sorted(self.rows.items(), key=lambda row: -row[1].sent_bytes):
            name, axes = key.collective, ",".join(key.axes)
            lines.append(f"{name:<16}{axes:<14}{key.purpose:<12}{count.calls:>8}{count.sent_bytes / 1e6:>12.3f}")
        return "\n".join(lines)


@dataclass
class TrafficMeter:
    """Counts while the collectives run."""

    _rows: dict[TrafficKey, TrafficCount] = field(default_factory=dict)

    def add(self, key: TrafficKey, sent_bytes: int) -> None:
        count = self._rows.get(key, TrafficCount())
        self._rows[key] = replace(count, calls=count.calls + 1, sent_bytes=count.sent_bytes + sent_bytes)

    def report(self) -> TrafficReport:
        return TrafficReport(dict(self._rows))

    def __iter__(self) -> Iterator[TrafficKey]:
        return iter(self._rows)
