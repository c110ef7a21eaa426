"""Shared parts of the benchmarks: running a mode on some ranks, and a report as Markdown."""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._machine import describe_machine
from benchmarks._network import Network, private_network
from benchmarks._work import Work
from partita.memory.capacity import usable_cores

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 600
# Ranks that still run this long before the time-out write their stacks to the log.
DUMP_S = 10
# Modes compute the same losses, except for the order of sums.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Run:
    """Measurements of all ranks of one run, in rank order (see :class:`benchmarks._rank.Rank`)."""

    ranks: list[dict[str, Any]]
    network_is_own: bool

    @property
    def step_s(self) -> float:
        """Seconds of the median step; a step ends when its slowest rank ends."""
        return statistics.median(map(max, zip(*(rank["times_s"] for rank in self.ranks), strict=True)))

    @property
    def losses(self) -> list[float]:
        """The mean loss over the ranks at each step."""
        every = zip(*(rank["losses"] for rank in self.ranks), strict=True)
        return [sum(losses) / len(losses) for losses in every]

    @property
    def peak_bytes(self) -> int:
        """The peak resident memory of the rank that uses most."""
        return max(int(rank["peak_bytes"]) for rank in self.ranks)

    @property
    def work_bytes(self) -> int:
        """The peak without the memory of the imports."""
        return max(int(rank["peak_bytes"] - rank["imported_bytes"]) for rank in self.ranks)

    @property
    def steady_work_bytes(self) -> int:
        """The peak over the measured steps, without the memory of the imports."""
        return max(int(rank["steady_peak_bytes"] - rank["imported_bytes"]) for rank in self.ranks)

    def total(self, key: str) -> float:
        """Return the sum of a figure over the ranks."""
        return sum(float(rank[key]) for rank in self.ranks)


def run(
    mode: str,
    num_ranks: int,
    work: Work,
    *,
    folder: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    hosts: Network | None = None,
) -> Run:
    """Train in one mode, in new processes, on a private loopback network if that is allowed.

    Args:
        folder: the folder of the disk tier and of the files to start from; None: the system's temporary folder.
        hosts: the hosts over which the ranks are spread, instead of the private network.

    Raises:
        RuntimeError: a rank failed, or the time was up; the message has the last output of the ranks that failed.
    """
    network = [] if hosts else private_network()
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // num_ranks)),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # DeepSpeed looks for ninja there
    }
    if folder is not None:
        environment["TMPDIR"] = str(folder)
    with tempfile.TemporaryDirectory() as results, tempfile.TemporaryFile("w+") as said:
        described = [json.dumps(asdict(hosts or Network())), mode, json.dumps(asdict(work))]
        words = [str(num_ranks), *described, results, str(timeout_s - DUMP_S)]
        command = [sys.executable, "-m", "benchmarks._ranks", *words]
        process = subprocess.Popen(
            [*network, *command],
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"no end within {timeout_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status:
            said.seek(0)
            raise RuntimeError(f"{mode} on {num_ranks} ranks failed ({status}):\n{said.read()}")
        ranks = [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return Run(ranks, bool(network or hosts))


def check_losses(runs: dict[str, Run], reference: str) -> None:
    """Check that all modes have the same losses.

    Raises:
        RuntimeError: the losses of a mode differ from those of the reference.
    """
    for mode, other in runs.items():
        pairs = zip(other.losses, runs[reference].losses, strict=True)
        worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        if not worst <= LOSS_TOLERANCE:
            raise RuntimeError(f"{mode} does not train as {reference}: losses {worst:.1e} apart")


@dataclass
class Report:
    """A report in Markdown, printed as it is written, and the list of missed targets."""

    title: str
    lines: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def begin(self) -> None:
        self.write(f"# {self.title}")
        self.write()
        arguments = [argument for argument in sys.argv[1:] if argument != "--save"]
        command = shlex.join(["python", "-m", f"benchmarks.{_name_of_script()}", *arguments])
        self.write(f"`{command}` on {describe_machine()}")
        self.write()

    def write(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Write a table; rows are printed as soon as they are known."""
        self.write("| " + " | ".join(header) + " |")
        self.write("|" + " --- |" * len(header))
        for row in rows:
            self.write("| " + " | ".join(row) + " |")
        self.write()

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)

    def end(self, save: bool, name: str | None = None) -> int:
        """List the missed targets; save the report as ``name`` (None: as the script); return the exit status."""
        for text in self.broken:
            self.write(f"- MISSED: {text}")
        if not self.broken:
            self.write("Everything that was checked holds.")
        if save:
            RESULTS.mkdir(exist_ok=True)
            path = RESULTS / f"{name or _name_of_script().replace('.', '_')}.md"
            path.write_text("\n".join(self.lines) + "\n")
        return 1 if self.broken else 0


def _name_of_script() -> str:
    path = Path(sys.argv[0])
    return f"gpu.{path.stem}" if path.parent.name == "gpu" else path.stem


def parser(description: str, worlds: Sequence[int]) -> argparse.ArgumentParser:
    """Return a parser with the arguments that the benchmarks have in common."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--quick", action="store_true", help="a small model and few modes: does it run?")
    made.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    made.add_argument("--ranks", type=int, nargs="+", default=list(worlds), help="numbers of ranks (not with --quick)")
    made.add_argument("--only", nargs="+", default=None, metavar="MODE", help="the modes to run, by name")
    return made


def opened(title: str, worlds: Sequence[int] = (), *, reps: int) -> tuple[Report, argparse.Namespace]:
    """Parse the options and begin a report of modes that are compared in some repetitions (``--quick``: one)."""
    made = parser(title, worlds)
    made.add_argument("--reps", type=int, default=reps, help="repetitions")
    options = made.parse_args()
    if options.quick:
        options.reps = 1
    report = Report(title)
    report.begin()
    return report, options


def in_turn(modes: Iterable[str], num_reps: int) -> Iterator[tuple[int, str]]:
    """Yield (repetition, mode). Every other repetition has the opposite order, so that no mode always comes first."""
    listed = list(modes)
    for rep in range(num_reps):
        for mode in listed[::-1] if rep % 2 else listed:
            yield rep, mode


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over repetitions of a mode's time divided by another's in the same repetition."""
    return statistics.median(one / other for one, other in zip(mine, theirs, strict=True))


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f}"
