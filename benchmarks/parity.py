"""The parity matrix: all stages must be bitwise equal, and agree with PyTorch, for every kind of model.

    python -m benchmarks.parity            # the whole matrix
    python -m benchmarks.parity --quick    # one model, 1 and 2 ranks
    python -m benchmarks.parity --save     # the whole matrix, into benchmarks/results/parity.md

It ends with status 1 if a target is missed. tests/features/parity.py has the runs and their checks.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks._common import RESULTS, ROOT, Report
from tests.features import parity
from tests.features.parity import CLIP, COMPUTES, CUT_STEPS, SAMPLES, STAGES, STEPS, Cut
from tests.kit.models import CASES

TOLERANCE, HALF_TOLERANCE = 1e-5, 0.02
HIERARCHICAL_WORLD = 4  # two nodes of two ranks


@dataclass(frozen=True)
class Scope:
    """The part of the matrix to run."""

    names: Sequence[str]
    worlds: Sequence[int]
    cut_plans: Sequence[str]

    def plans(self, world: int) -> tuple[str, ...]:
        return (*STAGES, "hierarchical") if world == HIERARCHICAL_WORLD else STAGES


FULL = Scope(tuple(CASES), (1, 2, 4), STAGES)
QUICK = Scope(("decoder",), (1, 2), ("1", "3"))


def main() -> int:
    parser = argparse.ArgumentParser(description="The parity matrix")
    parser.add_argument("--quick", action="store_true", help="one model, 1 and 2 ranks")
    parser.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    options = parser.parse_args()
    scope = QUICK if options.quick else FULL
    report = Report("Parity")
    report.begin()
    marks = [f"{compute} {plan}" for compute in COMPUTES for plan in (*STAGES[1:], "hier.")]
    for title, text, header, rows in (
        (
            "Between stages, and compared with plain PyTorch",
            _STAGES,
            ["model", "ranks", *marks, "gradients", "bf16 loss", "fall"],
            _stage_rows(report, scope),
        ),
        (
            "Beside DistributedDataParallel",
            _DDP,
            ["model", "ranks", "losses", "norms", "weights"],
            _ddp_rows(report, scope),
        ),
        ("One batch, cut in any way", _CUTS, ["model", "curves", "losses", "norms", "rates"], _cut_rows(report, scope)),
    ):
        report.write(f"## {title}")
        report.write()
        report.write(text.format(cut_plans=", ".join(scope.cut_plans)))
        report.write()
        report.table(header, rows)
    return report.end(options.save)


_STAGES = f"""{STEPS} steps of AdamW, {SAMPLES} samples each over all ranks in one micro-batch, clipped to norm {CLIP}.
`=`: every loss, gradient norm, gradient (of the first batch) and final weight, on every rank, is bitwise that of stage
0 on the same ranks; else the digits that agree. *hier.*: hierarchical, on two nodes of two ranks. *gradients*:
digits, of each tensor's largest value, that agree with single-process PyTorch on the whole batch (BatchNorm in
evaluation mode), for the worst tensor of the worst stage. *bf16 loss*: the largest relative difference of a step's mean
loss from fp32's. *fall*: by how much the loss fell meanwhile. Targets: `=` everywhere, 5 digits here and in the tables
below, and {HALF_TOLERANCE:.0%} for bf16. The biases of BERT's keys have a gradient that only rounding keeps from zero:
it is checked to be almost zero, and not compared."""

_DDP = f"""{STEPS} steps of SGD with momentum at stage 3, and by torch's DDP on the same ranks, BatchNorm in training
mode: digits that agree, for the worst step, and for the worst tensor of the final weights and buffers."""

_CUTS = f"""{CUT_STEPS} steps of AdamW with warm-up and cosine on batches of {SAMPLES} samples, cut into every micro x
accumulate x ranks, each with `backward` and `step` by hand and with `train_batch`, at the stages {{cut_plans}}:
digits of each step's mean loss, gradient norm and learning rate that agree with one rank and one micro-batch at the
first stage, for the worst of all curves."""


def _digits(report: Report, amount: float, what: str, allowed: float = TOLERANCE) -> str:
    """Return the number of digits that agree; a difference of more than ``allowed`` is a missed target."""
    report.expect(amount <= allowed, f"{what}: {amount:.1e} apart, {allowed:g} allowed")
    if amount == 0:
        return "all"
    return f"{-math.log10(amount):.1f}" if math.isfinite(amount) else "none"


def _bits(report: Report, unequal: dict[str, float], what: str) -> str:
    """Return '=' if two runs are bitwise equal, else the number of digits that agree."""
    if not unequal:
        return "="
    worst = max(unequal, key=lambda name: unequal[name])
    report.expect(False, f"{what}: {len(unequal)} values differ, most of all {worst}")
    return _digits(report, unequal[worst], f"{what}, {worst}")


def _stage_rows(report: Report, scope: Scope) -> Iterator[list[str]]:
    for name in scope.names:
        for world in scope.worlds:
            plans = scope.plans(world)
            verdict = parity.judge(name, world, plans)
            cells = []
            for compute in COMPUTES:
                for plan in (*STAGES[1:], "hierarchical"):
                    what = f"{name} on {world} ranks, {compute}, {plan} beside 0"
                    cells.append(_bits(report, verdict.from_stage_0[plan, compute], what) if plan in plans else "")
            worst = max(amount for errors in verdict.from_plain.values() for amount in errors.values())
            half = max(verdict.from_fp32.values())
            _digits(report, half, f"{name} on {world} ranks, bf16 losses", HALF_TOLERANCE)
            gradients = _digits(report, worst, f"{name} on {world} ranks, gradients")
            yield [name, str(world), *cells, gradients, f"{half:.3%}", f"{verdict.fall:.1%}"]


def _ddp_rows(report: Report, scope: Scope) -> Iterator[list[str]]:
    for name in scope.names:
        for world in scope.worlds:
            errors = parity.ddp_errors(name, world)
            losses, norms = errors.pop("losses"), errors.pop("norms")
            what = f"{name} on {world} ranks beside DDP"
            amounts = {"losses": losses, "norms": norms, "weights": max(errors.values())}
            yield [name, str(world), *(_digits(report, amount, f"{what}, {key}") for key, amount in amounts.items())]


def _cut_rows(report: Report, scope: Scope) -> Iterator[list[str]]:
    for name in scope.names:
        curves = parity.all_curves(name, scope.cut_plans, scope.worlds)
        reference = curves[scope.cut_plans[0], Cut(1, 1, "step")]
        cells = []
        for part in ("losses", "norms", "lrs"):
            worst = max(
                parity.largest_ratio(getattr(curve, part), getattr(reference, part)) for curve in curves.values()
            )
            cells.append(_digits(report, worst, f"{name} cut in other ways, {part}"))
        yield [name, str(len(curves)), *cells]


if __name__ == "__main__":
    sys.exit(main())
