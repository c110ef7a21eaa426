"""The time of a step between hosts, compared with torch's own training modes, uncompressed and compressed: over lines
of 100 Mbit/s and 1 Gbit/s, over unlimited lines, and over TCP within one host.

    python -m benchmarks.network            # 12M and 25M parameters, two hosts: three quarters of an hour on 2 cores
    python -m benchmarks.network --quick    # a small model over 1 Gbit/s: no targets
    python -m benchmarks.network --save     # into benchmarks/results/network.md

Hosts are network namespaces on a switch, with lines that are limited to the rate (``tc tbf``; TCP with Linux's default
CUBIC); this needs root and iproute2.

The result is the ratio to DDP in the same repetition. Run nothing else at the same time. It ends with status 1 if a
target is missed.
"""

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from benchmarks._common import Report, Run, check_losses, parser, run
from benchmarks._modes import LOSSY, OVER_NETWORK, PARTITA
from benchmarks._network import joined_hosts
from benchmarks._work import Work


@dataclass(frozen=True)
class Line:
    """The connection of the ranks: bits per second in each direction, and its name for ``tc`` (None: unlimited)."""

    title: str
    rate: str | None = None
    bits_per_s: float = 0.0
    steps: int = 12
    warmup: int = 3
    joins_hosts: bool = True  # False: the loopback of one host

    def modes(self, size: str) -> tuple[str, ...]:
        """Return the modes that are compared with DDP; compression is measured with one model only."""
        if not self.joins_hosts:
            return ("DDP", "FSDP2", *OVER_NETWORK)
        return ("DDP", "FSDP2", *PARTITA, *(LOSSY if size == LARGE else ()))


LINES = (
    Line("100 Mbit/s", "100mbit", 100e6, steps=5, warmup=2),
    Line("1 Gbit/s", "1gbit", 1e9),
    Line("unlimited"),
    Line("loopback", joins_hosts=False),
)
SMALL, LARGE = "12M", "25M"
WORKS = {
    SMALL: Work(layers=8, width=352, heads=8, ffn_width=944),
    LARGE: Work(layers=8, width=512, heads=8, ffn_width=1376),
}
QUICK_WORKS = {"2M": Work(layers=4, width=192, heads=4, ffn_width=512)}
QUICK_MODES = ("DDP", "partita 1", "partita 3")
CODED = [mode for mode in LOSSY if mode.startswith("partita")]

# The mode that only computes: one process of plain PyTorch per host.
ALONE = "plain"
# Target of compressed modes, in units of the time of computation plus (bytes / rate).
OVER_FLOOR = 1.15
# Targets in units of DDP's step.
BETWEEN_HOSTS = {"partita 1": 1.00, "partita 2": 1.00, "partita 3, kept": 1.00, "partita 3": 1.50}
WITHIN_HOST = {"partita 1": 1.00, "partita 2": 1.00, "partita 3, kept": 1.00, "partita 3": 1.10}

# Modes that are compared on the slowest line: the scheme with DDP's held-out loss to 1 % and the fewest bytes
# (results/wires.md), and torch's own compression.
AT_EQUAL_LOSS, TORCHS_OWN, OF_DDP = "partita 1, ternary, onebit_adam", "DDP + PowerSGD", 0.20


def main() -> int:
    made = parser("The time of a step between hosts", (2,))
    made.add_argument("--reps", type=int, default=3, help="repetitions (at 100 Mbit/s: one)")
    made.add_argument("--lines", nargs="+", default=[line.title for line in LINES], help="what joins the ranks")
    made.add_argument("--models", nargs="+", default=list(WORKS), help="by parameters")
    options = made.parse_args()
    report = Report("Between hosts")
    report.begin()
    report.write(_TEXT.format(num_reps=options.reps))
    report.write()
    header = ["line", "parameters", "ranks", "mode", "ms per step", "x DDP", "smallest - largest", "target"]
    lines, works = [line for line in LINES if line.title in options.lines], {m: WORKS[m] for m in options.models}
    if options.quick:
        lines, works = [replace(LINES[1], steps=4, warmup=1)], QUICK_WORKS
    report.table(
        [*header, "MB sent", "line in use", "x floor"],
        (
            row
            for line in lines
            for size, work in works.items()
            if line.joins_hosts or size == SMALL
            for world in ([2] if options.quick else options.ranks)
            for row in _rows(report, options, line, size, work, world)
        ),
    )
    return report.end(options.save)


_TEXT = """Medians over {num_reps} repetitions (at 100 Mbit/s: one, of three steps) of a step's time and of its ratio
to DDP's in the same repetition; in a run, a step is as long as its slowest rank's, and the median step counts. *MB
sent*: bytes of the first host's interface in a step (of the loopback: both ranks'). *line in use*: the share of the
step in which a line of this rate is busy with these, in one direction. *x floor*: in units of the time in which plain
PyTorch computes the step, alone on each host, plus the time of these bytes on the line. Both hosts share this
machine's cores. On the loopback, partita's ranks, which could read each other's memory, are configured to use the
network."""


def _rows(report: Report, options: Namespace, line: Line, size: str, work: Work, world: int) -> Iterator[list[str]]:
    modes: Sequence[str] = options.only or (QUICK_MODES if options.quick else line.modes(size))
    has_floor = line.rate is not None and not options.quick
    work = replace(work, steps=line.steps, warmup=line.warmup)
    every, alone = {mode: list[Run]() for mode in modes}, list[Run]()
    with joined_hosts(2, line.rate) if line.joins_hosts else nullcontext() as hosts:
        for rep in range(1 if options.quick or line.steps < 10 else options.reps):
            for mode in reversed(modes) if rep % 2 else modes:
                every[mode].append(run(mode, world, work, hosts=hosts))
                print(f"  {line.title}, {size}, {mode}: {every[mode][-1].step_s * 1e3:.0f} ms", file=sys.stderr)
            if has_floor:
                alone.append(run(ALONE, world, work, hosts=hosts))
            check_losses({mode: runs[-1] for mode, runs in every.items() if mode not in LOSSY}, modes[0])
    times_s = {mode: statistics.median(one.step_s for one in runs) for mode, runs in every.items()}
    if line is LINES[0] and {AT_EQUAL_LOSS, TORCHS_OWN} <= times_s.keys():
        ours, torchs, ddp = times_s[AT_EQUAL_LOSS], times_s[TORCHS_OWN], times_s[modes[0]]
        report.expect(ours <= OF_DDP * ddp, f"{AT_EQUAL_LOSS}: {ours / ddp:.2f} x DDP, target {OF_DDP:.2f}")
        report.expect(ours <= torchs, f"{AT_EQUAL_LOSS}: {ours / torchs:.2f} x {TORCHS_OWN}, target 1.00")
    targets = {} if options.quick else BETWEEN_HOSTS if line.joins_hosts else WITHIN_HOST
    for mode, runs in every.items():
        ratios = [mine.step_s / theirs.step_s for mine, theirs in zip(runs, every[modes[0]], strict=True)]
        ratio, target = statistics.median(ratios), targets.get(mode.removesuffix(", over the network"))
        if target is not None:
            held = round(ratio, 2) <= target
            report.expect(held, f"{line.title}, {size}, {mode}: {ratio:.2f} x DDP, target {target:.2f}")
        step_s = times_s[mode]
        sent = float(runs[0].ranks[0]["interface_bytes_a_step"])
        share, over_floor = "", ""
        if has_floor:
            line_s = sent * 8 / line.bits_per_s
            times = step_s / (statistics.median(one.step_s for one in alone) + line_s)
            share, over_floor = f"{line_s / step_s:.0%}", f"{times:.2f}"
            if mode in CODED:
                held = round(times, 2) <= OVER_FLOOR
                report.expect(held, f"{line.title}, {size}, {mode}: {times:.2f} x floor, target {OVER_FLOOR:.2f}")
        yield [
            *(line.title, size, str(world), mode, f"{step_s * 1e3:.0f}", f"{ratio:.2f}"),
            *(f"{min(ratios):.2f} - {max(ratios):.2f}", "" if target is None else f"<= {target:.2f}"),
            *(f"{sent / 1e6:.1f}", share, over_floor),
        ]


if __name__ == "__main__":
    sys.exit(main())
