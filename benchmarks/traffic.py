"""Bytes sent in a step: as counted, as planned and as seen by the operating system, compared with torch's.

    python -m benchmarks.traffic            # 2 and 4 ranks
    python -m benchmarks.traffic --quick    # 2 ranks, a small model
    python -m benchmarks.traffic --save     # into benchmarks/results/traffic.md

It ends with status 1 if a target is missed: counted bytes equal the plan exactly; the loopback counters of the system
agree within 3 %; stages 1 and 2 send as much as DDP, and stage 3 sends 1.5 times as much.
"""

import sys
import time
from collections.abc import Iterator

from benchmarks._common import Report, Run, check_losses, megabytes, parser, run
from benchmarks._modes import OVER_NETWORK
from benchmarks._network import sent_bytes
from benchmarks._work import Work

MODES = ("DDP", "DDP + ZeRO-1", "FSDP2", "FSDP2, kept", *OVER_NETWORK)
QUICK_MODES = ("DDP", "FSDP2", "partita 1, over the network", "partita 3, over the network")
WORK = Work(layers=8, width=512, heads=8, ffn_width=1376, steps=6, warmup=2)
QUICK_WORK = Work(layers=4, width=256, heads=4, ffn_width=704, steps=4, warmup=2)
# Targets in units of DDP's bytes.
TARGETS = {mode: 1.5 if mode == "partita 3, over the network" else 1.0 for mode in OVER_NETWORK}
TOLERANCE = 0.03

# On a shared network, a run counts if the network was idle before and after it.
IDLE_BYTES_A_S, LISTEN_S, TRIES = 100_000, 1.0, 10


def main() -> int:
    options = parser("Bytes a step", (2, 4)).parse_args()
    work, modes = (QUICK_WORK, QUICK_MODES) if options.quick else (WORK, MODES)
    worlds = [2] if options.quick else options.ranks
    report = Report("Traffic")
    report.begin()
    report.write(_TEXT)
    report.write()
    header = ["ranks", "mode", "counted MB", "plan MB", "system MB", "system / counted", "x DDP", "target"]
    rows = (row for world in worlds for row in _rows(report, world, work, options.only or modes))
    report.table(header, rows)
    return report.end(options.save)


_TEXT = """Megabytes sent in a step by all ranks together. *counted*: what the collectives counted (its equality with
*plan*, the formula computed from the residence table, is exact on every rank). *system*: bytes of the loopback
interface, including protocol headers and the barriers around the measured steps; partita's ranks, which could read
each other's memory, use the interface here. *x DDP*: system bytes, in units of DDP's."""


def _rows(report: Report, world: int, work: Work, modes: tuple[str, ...]) -> Iterator[list[str]]:
    runs: dict[str, Run] = {}
    for mode in modes:
        result = runs[mode] = _run_alone(mode, world, work)
        check_losses(runs, modes[0])
        cells = [str(world), mode, "", "", megabytes(_seen(result)), "", "", ""]
        if "counted_bytes_a_step" in result.ranks[0]:
            counted = result.total("counted_bytes_a_step")
            exact = all(rank["counted_bytes_a_step"] == rank["expected_bytes_a_step"] for rank in result.ranks)
            report.expect(exact, f"{mode} on {world} ranks counts what the plan says")
            agreement = _seen(result) / counted
            report.expect(abs(agreement - 1) <= TOLERANCE, f"{mode} on {world} ranks: system / counted {agreement:.3f}")
            cells[2:4] = megabytes(counted), megabytes(result.total("expected_bytes_a_step"))
            cells[5] = f"{agreement:.3f}"
        if "DDP" in runs:
            ratio = _seen(result) / _seen(runs["DDP"])
            cells[6] = f"{ratio:.3f}"
            if mode in TARGETS:
                target = TARGETS[mode]
                report.expect(
                    abs(ratio / target - 1) <= TOLERANCE, f"{mode} on {world} ranks: {ratio:.3f} x DDP's bytes"
                )
                cells[7] = f"{target:.2f}"
        yield cells


def _seen(result: Run) -> float:
    """Return the bytes of the interface, which all ranks share, as read by rank 0 between two barriers."""
    return float(result.ranks[0]["interface_bytes_a_step"])


def _run_alone(mode: str, world: int, work: Work) -> Run:
    """Run in a private network; in a shared one, repeat the run until there is no other traffic before and after it.

    Raises:
        RuntimeError: there was other traffic around every run.
    """
    for _ in range(TRIES):
        before = _others_bytes_a_s()
        result = run(mode, world, work)
        if result.network_is_own or max(before, _others_bytes_a_s()) <= IDLE_BYTES_A_S:
            return result
    raise RuntimeError(f"the loopback network was in use around each of {TRIES} runs; run nothing else")


def _others_bytes_a_s() -> float:
    before = sent_bytes()
    time.sleep(LISTEN_S)
    return (sent_bytes() - before) / LISTEN_S


if __name__ == "__main__":
    sys.exit(main())
