"""Bytes and seconds of a step, predicted and measured, over models x stages x offload x precision x ranks x axes.

    python -m benchmarks.predicted --only bytes --seconds 280     # as many cases as fit; repeat it for the others
    python -m benchmarks.predicted --only time --seconds 280      # on an idle machine
    python -m benchmarks.predicted --only report --save           # the table, into benchmarks/results/predicted.md
    python -m benchmarks.predicted --quick                        # four cases, a table, nothing stored

Results are stored in `benchmarks/results/predicted.json`, case by case, and are not measured again.

Bytes by state and bytes sent must equal the plan and the simulation exactly. A peak is the sum of two peaks: that of
the ledger (states and buffers of the engine, each kind at its peak), and that of torch's CPU allocator outside the
ledger in a step, from the allocations that torch's profiler reports (memory of autograd and operators, temporaries
within kernels included). It is not resident memory, which excludes pages that were never touched and includes holes in
malloc's heap. Simulated peaks are from the real engine on tensors without values (`partita simulate`); planned peaks
(`partita plan`) are computed without the engine. Predicted seconds are the plan's for this machine, as measured by
`partita machine`.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, ROOT, Report
from benchmarks._predicted_cases import Case, cases
from benchmarks._ranks import wait
from partita.memory import accelerator
from partita.prediction.given_config import estimate_config
from partita.prediction.machine import Machine, read_machine, write_machine
from partita.prediction.measure_machine import measure_machine
from partita.prediction.model_source import read_source
from partita.prediction.simulate.cluster import Cluster, simulate
from partita.prediction.simulate.rank import RankReport, SimulatedModel

KEPT = RESULTS / "predicted.json"
STEPS, TOGETHER = 7, 6
PEAK_TOLERANCE, TIME_TOLERANCE, APART = 0.02, 0.25, 1.25
QUICK = ("GPT 256, 1 x stage 0", "GPT 256, 2 x stage 1", "GPT 256, 2 x stage 3", "ResNet, 2 x stage 3")

Kept = dict[str, dict[str, Any]]


def main() -> int:
    options = _options()
    listed = [case for case in cases() if not options.quick or case.name in QUICK]
    kept: Kept = json.loads(KEPT.read_text()) if KEPT.exists() and not options.quick else {}
    deadline = time.monotonic() + options.seconds
    found: Callable[[Kept], object] = (lambda _: None) if options.quick else _keep
    if options.only in (None, "bytes"):
        for case in _missing(listed, kept, "predicted"):
            kept.setdefault(case.name, {})["predicted"] = predicted(case)
            found(kept)
            if time.monotonic() > deadline:
                return 0
        for name, of_ranks in _run(_missing(listed, kept, "measured"), "measured", deadline):
            kept.setdefault(name, {})["measured"] = of_ranks
            found(kept)
    if options.only in (None, "time"):
        for num_ranks in (1, 2):
            machine_of(num_ranks)
        timed = [case for case in listed if case.timed]
        for name, seconds in _run(_missing(timed, kept, "seconds"), "seconds", deadline):
            kept.setdefault(name, {})["seconds"] = seconds
            found(kept)
    if options.only == "time" or time.monotonic() > deadline:
        return 0
    return _report(listed, kept, options.save)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description="Compare predictions with measurements")
    made.add_argument("--quick", action="store_true", help="four cases: does it run?")
    made.add_argument("--only", choices=("bytes", "time", "report"), default=None)
    made.add_argument("--seconds", type=float, default=1e9, help="start nothing after so many seconds")
    made.add_argument("--save", action="store_true", help="write the report into benchmarks/results/")
    return made.parse_args()


def _missing(listed: Sequence[Case], kept: Kept, what: str) -> list[Case]:
    return [case for case in listed if what not in kept.get(case.name, {})]


def _keep(kept: Kept) -> None:
    """Merge the results into the file, which another run may have changed in the meantime."""
    there: Kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept = {name: there.get(name, {}) | kept.get(name, {}) for name in {*there, *kept}}
    lines = (f"{json.dumps(name)}: {json.dumps(found, sort_keys=True)}" for name, found in sorted(kept.items()))
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# ------------------------------------------------------------------------------------------------------- predicting


def predicted(case: Case) -> dict[str, Any]:
    """Return each rank's figures from the simulation and the closed forms, and the largest planned peak of a rank."""
    source = read_source(case.model)
    simulated_model = SimulatedModel(
        lambda: read_source(case.model).model, lambda samples: source.batch(samples, accelerator.SIMULATED)
    )
    ranks = simulate(simulated_model, case.config, Cluster(case.ranks, "cpu", case.ranks), range(case.ranks)).ranks
    planned = estimate_config(source, case.config, case.ranks)
    peaks = [_of_device(planned.held(stage)) for stage in planned.units]
    return {"ranks": [_plain(rank) for rank in ranks], "planned_peak": max(peaks)}


def _of_device(held: dict[tuple[str, str], int]) -> int:
    return sum(num for (_, tier), num in held.items() if tier == "device")


def _plain(rank: RankReport) -> dict[str, Any]:
    def plain(traffic: Any) -> dict[str, list[int]]:
        rows = traffic.rows.items()
        return {" ".join([key.collective, *key.axes, key.purpose]): [of.calls, of.sent_bytes] for key, of in rows}

    states = ("parameters", "gradients", "control")
    return {
        "held": {" ".join(key): num for key, num in rank.planned_bytes.items()},
        "ledger_peak": _of_device(rank.memory.peak),
        "activations": rank.activation_bytes,
        "sent": plain(rank.traffic),
        "planned_sent": {key: num for key, num in plain(rank.planned_traffic).items() if key.split()[-1] in states},
    }


# -------------------------------------------------------------------------------------------------------- measuring


def _run(listed: Sequence[Case], what: str, deadline: float) -> Iterator[tuple[str, Any]]:
    """Measure as many cases as the time allows; each set of processes runs a few cases, one after the other."""
    for num_ranks in sorted({case.ranks for case in listed}):
        of_ranks = [case for case in listed if case.ranks == num_ranks]
        for at in range(0, len(of_ranks), TOGETHER):
            if time.monotonic() > deadline:
                return
            for name, found in measured(of_ranks[at : at + TOGETHER], STEPS if what == "seconds" else 0):
                yield name, max(each["seconds"] for each in found) if what == "seconds" else found


def measured(listed: Sequence[Case], num_steps: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield (case, measurements of each rank): the seconds of ``num_steps`` steps, or bytes if it is 0."""
    num_ranks = listed[0].ranks
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        files = [Path(folder, f"{rank}.jsonl") for rank in range(num_ranks)]
        processes = []
        for rank, file in enumerate(files):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            ways = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // num_ranks),
            }
            words = [json.dumps([asdict(case) for case in listed]), str(file), str(num_steps)]
            with Path(folder, f"{rank}.log").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "benchmarks._predicted_rank", *words],
                        cwd=ROOT,
                        env=os.environ | {name: str(value) for name, value in (places | ways).items()},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        failed = wait(processes, folder)
        lines = [
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files
        ]
        for found in zip(*lines, strict=False):
            yield found[0]["name"], list(found)
        if failed:
            raise RuntimeError(f"a rank of {num_ranks} failed")


def machine_of(num_ranks: int) -> Machine:
    """Return the measurement of this machine with ``num_ranks`` ranks; measure and store it if there is none."""
    path = RESULTS / f"machine-{num_ranks}.yaml"
    if not path.exists():
        write_machine(measure_machine(num_ranks, path.stem), path)
    return read_machine(path)


# -------------------------------------------------------------------------------------------------------- reporting


def _report(listed: Sequence[Case], kept: Kept, save: bool) -> int:
    report = Report("Bytes and seconds of a step: predicted and measured")
    report.begin()
    known = [case for case in listed if {"predicted", "measured"} <= kept.get(case.name, {}).keys()]
    report.write(_HEAD.format(known=len(known), listed=len(listed)))
    report.write()
    names = ("case", "states", "sent", "simulated peak MB", "measured MB", "off by", "planned MB", "off by")
    report.table(names, (_bytes_row(report, case, kept[case.name]) for case in known))
    timed = [case for case in listed if "seconds" in kept.get(case.name, {})]
    if timed:
        _times(report, timed, kept)
    return report.end(save)


def _bytes_row(report: Report, case: Case, of_case: dict[str, Any]) -> list[str]:
    predictions, found = of_case["predicted"]["ranks"], of_case["measured"]
    held = all(each["held"] == own["held"] for each, own in zip(predictions, found, strict=True))
    sent = all(each["sent"] == own["sent"] for each, own in zip(predictions, found, strict=True))
    simulated = [each["ledger_peak"] + each["activations"] for each in predictions]
    peaks = [own["ledger_peak"] + own["allocated_peak"] for own in found]
    off = max((a / b - 1 for a, b in zip(simulated, peaks, strict=True)), key=abs)
    report.expect(held, f"{case.name}: bytes by state are the plan's")
    report.expect(sent, f"{case.name}: bytes sent are the simulation's")
    report.expect(
        abs(off) <= PEAK_TOLERANCE, f"{case.name}: the simulated peak within {PEAK_TOLERANCE:.0%} ({off:+.1%})"
    )
    planned = of_case["predicted"]["planned_peak"]
    off_planned = planned / max(peaks) - 1
    report.expect(
        abs(off_planned) <= PEAK_TOLERANCE,
        f"{case.name}: the planned peak within {PEAK_TOLERANCE:.0%} ({off_planned:+.1%})",
    )
    on_paper = [f"{planned / 1e6:.2f}", f"{off_planned:+.2%}"]
    exact = ["exact" if each else "MISSED" for each in (held, sent)]
    return [case.name, *exact, f"{max(simulated) / 1e6:.2f}", f"{max(peaks) / 1e6:.2f}", f"{off:+.2%}", *on_paper]


def _times(report: Report, timed: Sequence[Case], kept: Kept) -> None:
    predictions = {case.name: _seconds(case) for case in timed}
    found = {case.name: kept[case.name]["seconds"] for case in timed}
    rows = []
    for name, seconds in found.items():
        off = predictions[name] / seconds - 1
        report.expect(abs(off) <= TIME_TOLERANCE, f"{name}: its time within {TIME_TOLERANCE:.0%} ({off:+.0%})")
        rows.append([name, f"{1e3 * predictions[name]:.1f}", f"{1e3 * seconds:.1f}", f"{off:+.0%}"])
    report.table(("case", "predicted ms", "measured ms", "off by"), rows)
    pairs = [(a, b) for a, b in combinations(found, 2) if max(found[a], found[b]) > APART * min(found[a], found[b])]
    wrong = [(a, b) for a, b in pairs if (predictions[a] < predictions[b]) != (found[a] < found[b])]
    report.expect(
        not wrong, f"the order of {len(wrong)} of {len(pairs)} pairs that differ by more than {APART - 1:.0%}"
    )
    within = sum(abs(predictions[name] / found[name] - 1) <= TIME_TOLERANCE for name in found)
    report.write(
        f"{within} of {len(found)} times are within {TIME_TOLERANCE:.0%}; of {len(pairs)} pairs of cases whose times "
        f"differ by more than {APART - 1:.0%}, {len(pairs) - len(wrong)} are predicted in the right order."
    )
    report.write()


def _seconds(case: Case) -> float:
    return estimate_config(read_source(case.model), case.config, case.ranks).time(machine_of(case.ranks)).total_s


_HEAD = """{known} of {listed} cases. *States*: bytes by state and tier of every rank are the closed form's, exactly.
*Sent*: calls and bytes of every rank, by collective, axes and purpose, are the simulation's, exactly. A *peak* is the
ledger's (each kind at its peak) plus the peak of torch's CPU allocator outside of it within a step, counted from its
own report of every allocation; *off by* is of the rank with the largest error. Within its call, a convolution makes a
second copy of its images, filters and result, in blocks of channels, and backward allocates scratch memory as well.
These depend on shape, processor and threads, and are not simulated. The ResNet's peaks lack 786,432 bytes of images
and 82,944 of filters. *Planned*: without the engine, of the rank that holds most."""


if __name__ == "__main__":
    sys.exit(main())
