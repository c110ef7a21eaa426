"""Memory and time of a tiled loss, compared with the untiled loss and torch's ``F.linear_cross_entropy``.

    python -m benchmarks.tiled_loss            # width 512, 16384 classes, 1 to 4096 positions, 7 repetitions
    python -m benchmarks.tiled_loss --quick    # small, once: no targets
    python -m benchmarks.tiled_loss --save     # into benchmarks/results/tiled_loss.md

One process. Every repetition runs forward and backward of each mode, every other one in the opposite order. Bytes are
the peak of the storages that head and loss allocate. It ends with status 1 if a target is missed.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from benchmarks._common import Report, in_turn, megabytes, opened, ratio
from tests.kit.live_bytes import LiveBytes

WHOLE, TORCH = "whole", "torch's linear_cross_entropy"
TARGETS = {"tiled: auto": 1.05}


@dataclass(frozen=True)
class Size:
    """Sizes of a head and of its input."""

    width: int
    classes: int
    positions: int

    def inputs(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return hidden states [1, positions, width] and targets."""
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(1, self.positions, self.width, generator=generator)
        return hidden.requires_grad_(), torch.randint(self.classes, (1, self.positions), generator=generator)


SIZES = (Size(512, 16384, 1024), Size(512, 16384, 4096))
QUICK_SIZES = (Size(64, 1000, 256),)


class HeadOnly(nn.Module):
    """A model that consists of a head only."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = nn.Linear(size.width, size.classes, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        return logits


def main() -> int:
    report, options = opened("Tiled loss", reps=7)
    sizes, targets = (QUICK_SIZES, {}) if options.quick else (SIZES, TARGETS)
    report.write(_TEXT.format(num_reps=options.reps))
    for size in sizes:
        report.write(f"\n{size.positions} positions, width {size.width}, {size.classes} classes:\n")
        header = ["loss", "peak MB", "x whole", "ms", "x whole", "target"]
        report.table(header, _rows(report, size, options.reps, targets))
    return report.end(options.save)


_TEXT = """Head and cross-entropy, forward and backward, in fp32 at stage 1 on one rank. Median over {num_reps}
repetitions of the time and of its ratio in the same repetition."""


def _steps(size: Size) -> Iterator[tuple[str, Callable[[int], None]]]:
    """Yield each mode, with a function that runs its forward and backward."""
    torch.manual_seed(0)
    for mode, tiled in ((WHOLE, "none"), ("tiled: auto", "auto"), ("tiled: 4MiB", "4MiB")):
        engine = partita.initialize(HeadOnly(size), {"loss": {"tiled": tiled}})

        def step(seed: int, engine: partita.Engine = engine) -> None:
            hidden, targets = size.inputs(seed)
            engine.backward(F.cross_entropy(engine(hidden).flatten(0, 1), targets.flatten()))
            engine.zero_grad()

        yield mode, step
    if hasattr(F, "linear_cross_entropy"):
        weight = HeadOnly(size).head.weight

        def torchs(seed: int) -> None:
            hidden, targets = size.inputs(seed)
            F.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten()).backward()
            weight.grad = None

        yield TORCH, torchs


def _peak_bytes(step: Callable[[int], None]) -> int:
    with LiveBytes() as live:
        step(0)
    return live.peak


def _rows(report: Report, size: Size, num_reps: int, targets: dict[str, float]) -> Iterator[list[str]]:
    steps = dict(_steps(size))
    peaks = {mode: _peak_bytes(step) for mode, step in steps.items()}
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for rep, mode in in_turn(steps, num_reps + 1):
        start = time.perf_counter()
        steps[mode](rep)
        if rep:  # the first repetition is a warm-up
            times[mode].append(time.perf_counter() - start)
    for mode in steps:
        times_whole, target = ratio(times[mode], times[WHOLE]), targets.get(mode)
        if target is not None:
            report.expect(round(times_whole, 2) <= target, f"{mode}: {times_whole:.2f} x whole, target {target:.2f}")
        yield [
            mode,
            megabytes(peaks[mode]),
            f"{peaks[mode] / peaks[WHOLE]:.2f}",
            f"{statistics.median(times[mode]) * 1e3:.0f}",
            f"{times_whole:.2f}",
            "" if target is None else f"<= {target}",
        ]


if __name__ == "__main__":
    sys.exit(main())
