"""Comparison of two checkouts: they must compute the same bits, send the same messages and write the same files.

    python -m benchmarks.same_bits BEFORE AFTER           # two Python interpreters, each with its partita installed
    python -m benchmarks.same_bits BEFORE AFTER --quick   # one model, few plans, 1 and 2 ranks
    python -m benchmarks.same_bits BEFORE AFTER --save    # everything, into benchmarks/results/same_bits.md
    python -m benchmarks.same_bits BEFORE AFTER --ranks 2 # every model and plan, on 2 ranks

Both train every kind of model under every plan (stages, tiers, lean states, accumulation, ...), in separate processes.
Losses, gradient norms, weights, optimizer states, counted messages and bytes, checkpoints and exports (file by file)
are compared, and so is training that resumes from BEFORE's checkpoint. It ends with status 1 if anything differs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._bits import PLANS, QUICK_PLANS, Digests, Scope, plans_of
from benchmarks._common import RESULTS, ROOT, Report
from benchmarks._started import started
from tests.kit.models import CASES

WORLDS = (1, 2, 4)


def main() -> int:
    made = argparse.ArgumentParser(description="The bits of two checkouts")
    own = Path(sys.executable)
    made.add_argument("before", type=Path, nargs="?", default=own, help="the interpreter of the one (this one)")
    made.add_argument("after", type=Path, nargs="?", default=own, help="the interpreter of the other (this one)")
    made.add_argument("--quick", action="store_true", help="one model, few plans, 1 and 2 ranks")
    made.add_argument("--ranks", type=int, nargs="+", default=list(WORLDS), help="numbers of ranks (not with --quick)")
    made.add_argument("--plans", nargs="+", default=list(PLANS), choices=PLANS, metavar="PLAN", help="plans (all)")
    made.add_argument("--models", nargs="+", default=list(CASES), choices=CASES, help="models (all)")
    made.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    options = made.parse_args()
    report = Report("Two checkouts")
    report.begin()
    report.write(_TEXT)
    report.write()
    cases = ("decoder",) if options.quick else tuple(options.models)
    worlds = WORLDS[:2] if options.quick else options.ranks
    rows = (row for world in worlds for row in _rows(report, options, world, cases))
    report.table(["model", "ranks", "plans", "digests compared", "that differ"], rows)
    return report.end(options.save)


_TEXT = """Every loss, gradient norm, weight, optimizer state, count of messages and bytes, file of a checkpoint and of
an export, from two versions of the library; then the same for training that resumes from the first one's checkpoint."""


def _rows(report: Report, options: argparse.Namespace, world: int, cases: Sequence[str]) -> Iterator[list[str]]:
    names = QUICK_PLANS if options.quick else options.plans
    for case in cases:
        plans = plans_of(case, world, names)
        with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
            scope = Scope((case,), plans)
            expected = _train(options.before, world, scope, Path(before), Path(before))
            found = _train(options.after, world, scope, Path(after), Path(before))
        pairs = [pair for mine, theirs in zip(found, expected, strict=True) for pair in _pairs(mine, theirs, "")]
        unlike = [where for where, one, other in pairs if one != other]
        report.expect(not unlike, f"{case} on {world} ranks: {len(unlike)} differ, the first: {unlike[:3]}")
        yield [case, str(world), str(len(plans)), str(len(pairs)), str(len(unlike))]


def _pairs(found: Any, expected: Any, where: str) -> Iterator[tuple[str, object, object]]:
    """Yield (path, found, expected) for every leaf of two nested results; a key that is missing in one is a leaf."""
    if not (isinstance(found, Mapping) and isinstance(expected, Mapping)):
        yield where, found, expected
        return
    for key in found.keys() | expected.keys():
        yield from _pairs(found.get(key), expected.get(key), f"{where} / {key}" if where else str(key))


def _train(python: Path, world: int, scope: Scope, folder: Path, checkpoints: Path) -> list[Digests]:
    """Return the results of every rank with the partita of one interpreter."""
    arguments = [json.dumps(asdict(scope)), str(folder), str(checkpoints)]
    return started("benchmarks._bits", arguments, world, folder, python=python)


if __name__ == "__main__":
    sys.exit(main())
