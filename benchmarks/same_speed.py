"""Comparison of two checkouts: time of a step, a save and a load, and memory.

    python -m benchmarks.same_speed BEFORE AFTER          # two Python interpreters, each with its partita installed
    python -m benchmarks.same_speed BEFORE AFTER --quick  # a small model, one plan: no targets
    python -m benchmarks.same_speed BEFORE AFTER --save   # into benchmarks/results/same_speed.md

Both train the same decoder on two ranks under each plan, save and load, in turn and in separate processes. Figures are
the later version's divided by the earlier one's, as medians over the pairs. It ends with status 1 if one is above 1.05.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._common import RESULTS, ROOT, Report, in_turn
from benchmarks._started import started
from benchmarks._work import Work

NUM_RANKS, REPS, LIMIT = 2, 5, 1.05
WORK = Work(layers=16, width=512, heads=8, ffn_width=1408, batch=4, sequence=64, steps=9)
QUICK_WORK = Work(layers=2, width=64, heads=2, ffn_width=176, batch=4, sequence=16, steps=5)
PLANS: dict[str, dict[str, Any]] = {
    "1": {"zero": {"stage": 1}},
    "2": {"zero": {"stage": 2}},
    "3": {"zero": {"stage": 3}},
    "3 on host": {"zero": {"stage": 3, "offload": {"parameters": "host", "optimizer": "host"}}},
}
WHAT = ("step", "save", "load", "peak")
Figures = dict[str, float]


def main() -> int:
    made = argparse.ArgumentParser(description="The speed of two checkouts")
    own = Path(sys.executable)
    made.add_argument("before", type=Path, nargs="?", default=own, help="the interpreter of the one (this one)")
    made.add_argument("after", type=Path, nargs="?", default=own, help="the interpreter of the other (this one)")
    made.add_argument("--quick", action="store_true", help="a small model, one plan: no targets")
    made.add_argument("--reps", type=int, default=REPS, help="pairs")
    made.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    options = made.parse_args()
    work = QUICK_WORK if options.quick else WORK
    plans = ("3",) if options.quick else tuple(PLANS)
    report = Report("The speed of two checkouts")
    report.begin()
    report.write(_TEXT.format(reps=options.reps))
    report.write()
    report.table(["stage", *WHAT], (_row(report, options, plan, work) for plan in plans))
    return report.end(options.save)


_TEXT = """A decoder of 53M parameters with Adam on two ranks: the later version's seconds (and peak of resident memory)
over the earlier one's, medians of {reps} pairs, and the smallest and largest of them."""


def _row(report: Report, options: argparse.Namespace, plan: str, work: Work) -> list[str]:
    pythons = {"before": options.before, "after": options.after}
    found: dict[str, list[Figures]] = {name: [] for name in pythons}
    for _, name in in_turn(pythons, options.reps):
        found[name].append(_measured(pythons[name], work, PLANS[plan]))
    row = [plan]
    for what in WHAT:
        pairs = [after[what] / before[what] for before, after in zip(*found.values(), strict=True)]
        middle = statistics.median(pairs)
        if not options.quick:
            report.expect(middle <= LIMIT, f"stage {plan}: {what} {middle:.3f} x the earlier one's")
        row.append(f"{middle:.3f} ({min(pairs):.2f} to {max(pairs):.2f})")
    return row


def _measured(python: Path, work: Work, config: dict[str, Any]) -> Figures:
    """Return the medians over the repetitions in a process; each repetition takes as long as its slower rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [json.dumps(asdict(work)), json.dumps(config), folder]
        ranks = started("benchmarks._speed_rank", arguments, NUM_RANKS, Path(folder), python=python)
    return {what: statistics.median(map(max, zip(*(rank[what] for rank in ranks), strict=True))) for what in WHAT}


if __name__ == "__main__":
    sys.exit(main())
