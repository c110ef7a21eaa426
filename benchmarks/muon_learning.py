"""Muon compared with AdamW: held-out loss and time of the job of `make train` with equal steps, for three seeds.

    python -m benchmarks.muon_learning            # about 20 minutes on two cores
    python -m benchmarks.muon_learning --quick    # 20 steps
    python -m benchmarks.muon_learning --save     # into benchmarks/results/muon_learning.md

The learning rate of each optimizer is the one with the lowest loss on the first seed, of several that are tried.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
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

    def row(self, name: str, rate: float, seed: int) -> list[str]:
        """Return the table's row."""
        losses = [f"{self.loss:.4f}", f"{self.at_half:.4f}"]
        return [name, f"{rate:g}", str(seed), *losses, f"{1e3 * self.step_s:.0f}"]


def main() -> int:
    made = parser("Learning with Muon", (2,))
    made.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates to try on the first seed")
    options = made.parse_args()
    report = Report("Learning with Muon")
    report.begin()
    report.write(TEXT.format(job=JOB.relative_to(ROOT)))
    report.write()
    means = list[str]()
    header = ["optimizer", "learning rate", "seed", "loss", "at half", "ms per step"]
    report.table(header, _rows(options.rates[:1] if options.quick else options.rates, options.quick, means))
    report.write(f"Mean over the seeds at the best rate: {', '.join(means)}.")
    report.write()
    return report.end(options.save)


def _rows(rates: Sequence[float], quick: bool, means: list[str]) -> Iterator[list[str]]:
    """Yield the rows of the table, and append the mean loss of each optimizer to ``means``."""
    for name in ("adamw", "muon"):
        at_first = dict[float, float]()
        for rate in rates:
            learned = learn(name, rate, SEEDS[0], quick)
            at_first[rate] = learned.loss
            yield learned.row(name, rate, SEEDS[0])
        best = min(at_first, key=at_first.__getitem__)
        losses = [at_first[best]]
        for seed in () if quick else SEEDS[1:]:
            learned = learn(name, best, seed, quick)
            losses.append(learned.loss)
            yield learned.row(name, best, seed)
        means.append(f"{name} {statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})")


def learn(name: str, rate: float, seed: int, quick: bool) -> Learned:
    """Run the job with an optimizer, and return its losses and the time of a step."""
    changes = {"engine.optimizer.name": name, "engine.optimizer.lr": rate, "model.seed": seed, "data.seed": seed}
    steps, evaluations = run_job([f"{key}={value}" for key, value in changes.items()], quick=quick)
    at_half = next(each for each in evaluations if each.step >= evaluations[-1].step / 2)
    step_s = statistics.median(step.step_s for step in steps)
    return Learned(evaluations[-1].held_out_loss, at_half.held_out_loss, step_s)


if __name__ == "__main__":
    sys.exit(main())
