"""Learning with Muon beside AdamW: held-out loss and time of the job of `make train` at equal steps, on three seeds.

    python -m benchmarks.muon_learning            # about 20 minutes on two cores
    python -m benchmarks.muon_learning --quick    # 20 steps
    python -m benchmarks.muon_learning --save     # into benchmarks/results/muon_learning.md

The learning rate of each optimizer is the best of some on the first seed.
"""

import statistics
import sys
from typing import NamedTuple

from benchmarks._common import ROOT, Report, parser
from benchmarks._job import JOB, run_job

RATES = (1.5e-3, 3e-3, 6e-3)
SEEDS = (0, 1, 2)
TEXT = """The job of `make train` ({job}) on two processes under stage 3. *Seed*: of the weights, of the
split of the text, and of the order of samples. *Loss*: held out, in nats per byte, at the end and after half of the
steps. *ms per step*: median. For each optimizer, the rate with the lowest loss on the first seed is used for the other
ones."""


class Learned(NamedTuple):
    loss: float
    at_half: float
    step_s: float


def main() -> int:
    options = parser("Learning with Muon", (2,)).parse_args()
    report = Report("Learning with Muon")
    report.begin()
    report.write(TEXT.format(job=JOB.relative_to(ROOT)))
    report.write()
    rates, seeds = (RATES[:1], SEEDS[:1]) if options.quick else (RATES, SEEDS)
    found, means = dict[tuple[str, float, int], Learned](), list[str]()
    for name in ("adamw", "muon"):
        for rate in rates:
            found[name, rate, seeds[0]] = learn(name, rate, seeds[0], options.quick)
        best = min(rates, key=lambda rate: found[name, rate, seeds[0]].loss)
        for seed in seeds[1:]:
            found[name, best, seed] = learn(name, best, seed, options.quick)
        losses = [found[name, best, seed].loss for seed in seeds]
        means.append(f"{name} {statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})")
    rows = [
        [name, f"{rate:g}", str(seed), f"{of.loss:.4f}", f"{of.at_half:.4f}", f"{1e3 * of.step_s:.0f}"]
        for (name, rate, seed), of in found.items()
    ]
    report.table(["optimizer", "learning rate", "seed", "loss", "at half", "ms per step"], rows)
    report.write(f"Mean over the seeds at the best rate: {', '.join(means)}.")
    report.write()
    return report.end(options.save)


def learn(name: str, rate: float, seed: int, quick: bool) -> Learned:
    """Run the job with an optimizer."""
    changes = {"engine.optimizer.name": name, "engine.optimizer.lr": rate, "model.seed": seed, "data.seed": seed}
    steps, evaluations = run_job([f"{key}={value}" for key, value in changes.items()], quick=quick)
    at_half = next(each for each in evaluations if each.step >= evaluations[-1].step / 2)
    step_s = statistics.median(step.step_s for step in steps)
    return Learned(evaluations[-1].held_out_loss, at_half.held_out_loss, step_s)


if __name__ == "__main__":
    sys.exit(main())
