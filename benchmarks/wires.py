"""Loss with compressed communication, compared with uncompressed communication after equal steps.

    python -m benchmarks.wires                 # all schemes on 4 ranks, some of them longer: many hours
    python -m benchmarks.wires --hours 2       # in parts: finished runs are stored, and none starts after 2 hours
    python -m benchmarks.wires --quick         # four schemes, 60 steps: no targets
    python -m benchmarks.wires --save          # into benchmarks/results/wires.md

There are two tasks: the complete job of `make train`, and a classifier of scikit-learn's images of digits. The schemes
differ only in the config. Every scheme gets the same samples in the same order, and the learning rate that is best
without compression. The schemes of the targets and their controls also learn the text for 3,000 steps. Bytes are those
that a rank sends in the complete run, warm-up and control messages included. It ends with status 1 if there is a target
that no scheme reaches.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks._common import Report, parser
from benchmarks._finished import Finished, add_parts, in_parts
from benchmarks._learning import Run, learn
from benchmarks._schemes import FULL, schemes

# (reduction of bytes compared with no compression, maximum loss in units of the uncompressed one)
TARGETS = ((5.0, 1.01), (12.0, 1.02), (100.0, 1.05))
RATES = {"text": (7.5e-4, 1.5e-3, 3e-3, 6e-3), "digits": (1e-3, 3e-3, 1e-2, 3e-2)}
# Optimizer steps of `make train` and of the digits.
STEPS = {"text": 1200, "digits": 600}
LONGER_STEPS = 3000
IN_LONGER = (
    FULL,
    "onebit_adam sends gradients, ternary after 5 %, 8-bit start",
    "local steps, 8, ternary, momentum 0.5",
    "control, full, frozen and capped after 5 %",
    "control, no feedback: ternary after 5 %, 8-bit start",
)
LONGER = "text, longer"
QUICK_STEPS = 60
IN_QUICK = (FULL, "int4 both ways", "onebit_adam at stage 1, ternary after 5 %", "local steps, 8, int4, momentum 0.5")


@dataclass(frozen=True)
class Learned:
    """The result of a scheme on a task.

    Attributes:
        losses: held-out loss by seed.
        above: the loss in units of the uncompressed one, over the seeds that both have.
        megabytes: megabytes that a rank sends.
        fewer: the reduction of bytes compared with no compression.
    """

    scheme: str
    losses: dict[int, float]
    above: float
    megabytes: float
    fewer: float


@dataclass(frozen=True)
class Study:
    """All runs of one task with the schemes in ``names``."""

    task: str
    steps: int
    num_ranks: int
    seeds: range
    names: Sequence[str]
    finished: Finished

    def rates(self) -> dict[float, float]:
        """Return the uncompressed loss with the first seed, by learning rate."""
        runs = {lr: self._run(FULL, self.seeds[0], lr).described() for lr in RATES[self.task]}
        self.finished.complete(runs.values(), learn)
        found = {lr: self.finished.of(run) for lr, run in runs.items()}
        return {lr: one["loss"] for lr, one in found.items() if one is not None}

    def learned(self, lr: float) -> Iterator[Learned]:
        """Yield the result of each scheme that has run, the uncompressed one first."""
        every = [self._run(name, seed, lr) for seed in self.seeds for name in self.names]
        self.finished.complete((run.described() for run in every), learn)
        full = self._found(FULL, lr)
        for name in self.names:
            if found := self._found(name, lr):
                losses = {seed: one["loss"] for seed, one in found.items()}
                both = [seed for seed in losses if seed in full]
                above = statistics.mean(losses[seed] for seed in both) / statistics.mean(full[s]["loss"] for s in both)
                (sent, full_sent) = (next(iter(of.values()))["megabytes"] for of in (found, full))
                yield Learned(name, losses, above, sent, full_sent / sent)

    def _found(self, name: str, lr: float) -> dict[int, dict[str, float]]:
        every = {seed: self.finished.of(self._run(name, seed, lr).described()) for seed in self.seeds}
        return {seed: found for seed, found in every.items() if found is not None}

    def _run(self, name: str, seed: int, lr: float) -> Run:
        return Run(self.task, name, self.steps, lr, seed, self.num_ranks)


def main() -> int:
    options = _options()
    report = Report("Loss with compressed communication")
    report.begin()
    finished = in_parts(options, "wires")
    names = tuple(schemes(1)) if options.only is None else tuple(dict.fromkeys([FULL, *options.only]))
    text, digits = (Study(task, STEPS[task], options.ranks[0], range(2), names, finished) for task in STEPS)
    longer = replace(text, steps=LONGER_STEPS, names=IN_LONGER, seeds=range(3))
    studies = {"text": text, LONGER: longer, "digits": digits}
    if options.quick:
        quick = {"steps": QUICK_STEPS, "names": IN_QUICK, "seeds": range(1)}
        studies = {task: replace(studies[task], **quick) for task in STEPS}
    found = {title: _section(report, title, study) for title, study in studies.items()}
    if not options.quick:
        report.write(_orders(found["text"], found["digits"]))
        report.write()
    for title in () if options.quick else ("text", LONGER):
        for fewer, above in TARGETS:
            holds = any(one.fewer >= fewer and one.above <= above for one in found[title])
            report.expect(holds, f"{title}: {fewer:g} times fewer bytes within {above - 1:.0%} of the full loss")
    return report.end(options.save)


def _options() -> argparse.Namespace:
    made = parser("Measure the loss with compressed communication", (4,))
    add_parts(made)
    return made.parse_args()


def _section(report: Report, title: str, study: Study) -> list[Learned]:
    report.write(f"## {_TITLES[title]}")
    report.write()
    report.write(_TEXTS[title].format(steps=study.steps, ranks=study.num_ranks))
    report.write()
    rates = study.rates()
    best = min(rates, key=lambda lr: rates[lr], default=RATES[study.task][0])
    shown = ", ".join(f"{lr:g}: {loss:.4f}" for lr, loss in rates.items())
    report.write(
        f"Held-out loss without compression by learning rate (seed {study.seeds[0]}): {shown}; all take {best:g}."
    )
    report.write()
    learned = list(study.learned(best))
    header = ["scheme", "held-out loss", "x full", "of each seed", "MB sent", "times fewer bytes"]
    report.table(header, map(_row, learned))
    return learned


def _orders(text: Sequence[Learned], digits: Sequence[Learned]) -> str:
    """Return a sentence with the rank correlations of the schemes between two seeds of a task and between the tasks."""
    of_digits = {one.scheme: one.losses for one in digits}
    both = [
        (one.losses, of_digits[one.scheme])
        for one in text
        if len(one.losses) == len(of_digits.get(one.scheme, ())) == 2
    ]
    if len(both) < 2:
        return "Too few schemes have run to compare their order."
    seeds = [list(zip(*(losses.values() for losses in of_task), strict=True)) for of_task in zip(*both, strict=True)]
    means = [[statistics.mean(losses.values()) for losses in of_task] for of_task in zip(*both, strict=True)]
    of_text, of_images, of_both = (_rank_correlation(*each) for each in (*seeds, means))
    return (
        f"Rank correlation of the schemes' losses: {of_text:.2f} between the text's seeds, {of_images:.2f} between "
        f"those of the digits, {of_both:.2f} between both tasks."
    )


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    places = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*places)


_TITLES = {
    "text": "The text of Python's standard library",
    "digits": "Images of digits",
    LONGER: "The text, for longer",
}
_TEXTS = {
    "text": """The model of `make train`, {steps} steps of 8 samples of 128 bytes on {ranks} ranks. Nats per byte on 512
samples of text that is held out. AdamW (or what the scheme's name says), cosine schedule, clipped to 1, fp32. *MB
sent*: what a rank sends in the whole run. *x full*: over the seeds that both have. *local steps, 8*: each rank by
itself, exchanging every 8 steps; an outer momentum of 0.9 where none is named. Controls separate the causes: *full,
frozen and capped*: onebit_adam that sends gradients, uncompressed after the warm-up; *no feedback*: the error of
compressed gradients is discarded.""",
    LONGER: """The same for {steps} steps, with three seeds: the schemes of the targets, and controls.""",
    "digits": """scikit-learn's 1,797 images of 8 x 8 pixels, 360 of them held out: two convolutions and two linear
layers, {steps} steps of 16 images on each of {ranks} ranks, shifted by up to a pixel. Nats per image; 98 to 99 % are
classified correctly, so a few images determine the loss: schemes within the spread of the seeds are equal here.""",
}


def _row(one: Learned) -> list[str]:
    losses = list(one.losses.values())
    return [
        *(one.scheme, f"{statistics.mean(losses):.4f}", f"{one.above:.3f}"),
        *(" ".join(f"{loss:.4f}" for loss in losses), f"{one.megabytes:.1f}", f"{one.fewer:.1f}"),
    ]


if __name__ == "__main__":
    sys.exit(main())
