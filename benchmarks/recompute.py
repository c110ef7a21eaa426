"""Memory and time of recomputed activations, compared with torch's checkpoint and save_on_cpu around the same blocks.

    python -m benchmarks.recompute            # 12 blocks of width 512, 2 x 512 positions, 7 repetitions: three minutes
    python -m benchmarks.recompute --quick    # a small model, once: no targets
    python -m benchmarks.recompute --save     # into benchmarks/results/recompute.md

One process. Every repetition runs one step of each mode, every other one in the opposite order. Kept bytes are those of
the storages that forward allocates and that are alive at its end. It ends with status 1 if a target is missed.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import partita
from benchmarks._common import Report, in_turn, megabytes, opened, ratio
from benchmarks._work import OPTIMIZER, Work
from tests.kit.live_bytes import LiveBytes

WORK = Work(layers=12, width=512, heads=8, ffn_width=1376, batch=2, sequence=512)
QUICK_WORK = Work(layers=3, width=64, heads=2, ffn_width=128, batch=2, sequence=64)
NONE, TORCH, TORCHS_OFFLOAD = "none", "torch's checkpoint", "torch's save_on_cpu"
UNITS = {"checkpoint": "units"}
# The activations section of each mode's config.
SETTINGS: dict[str, dict[str, str]] = {
    NONE: {},
    "units": UNITS,
    "selective": {"checkpoint": "selective"},
    "units, inputs on disk": {**UNITS, "offload": "disk"},
    "units, kept where they fit": {**UNITS, "keep_bytes": "auto"},
    TORCH: {},
    TORCHS_OFFLOAD: {},
}
MODES = tuple(SETTINGS)
# Targets in units of the step without recomputation: forward and backward cost three forward passes, and recomputation
# adds one, except for head and update.
TARGETS = {"units": 1.36, "selective": 1.36}


def main() -> int:
    report, options = opened("Recomputed activations", reps=7)
    report.write(_TEXT.format(num_reps=options.reps))
    report.write()
    header = ["activations", "kept MB", "x none", "ms per step", "x none", "target"]
    work, targets = (QUICK_WORK, {}) if options.quick else (WORK, TARGETS)
    report.table(header, _rows(report, work, options.reps, targets))
    return report.end(options.save)


_TEXT = """A decoder in fp32 with AdamW, stage 1 on one rank; *torch's checkpoint*: the blocks' calls go through
`torch.utils.checkpoint` (not reentrant); *torch's save_on_cpu*, around the forward, copies nothing where the CPU
computes, and neither does `activations.offload: host`. Median over {num_reps} repetitions of a step's time and of its
ratio in the same repetition."""


class Trained:
    """A model in one mode, and its step."""

    def __init__(self, mode: str, work: Work) -> None:
        self._work, self._mode, model = work, mode, work.build()
        if mode == TORCH:
            for block in model.modules():
                if type(block).__name__ == "Block":
                    _checkpoint_calls(block)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
        self._engine = partita.initialize(model, {"activations": SETTINGS[mode]}, optimizer=optimizer)

    def _loss(self, number: int) -> Tensor:
        tokens, targets = self._work.part_of_batch(number, 0, 1)
        with torch.autograd.graph.save_on_cpu() if self._mode == TORCHS_OFFLOAD else nullcontext():
            return nn.functional.cross_entropy(self._engine(tokens).flatten(0, 1), targets.flatten())

    def kept_bytes(self) -> int:
        with LiveBytes() as live:
            loss = self._loss(0)
            assert loss.requires_grad
            return live.total

    def step_s(self, number: int) -> float:
        start = time.perf_counter()
        self._engine.backward(self._loss(number))
        self._engine.step()
        return time.perf_counter() - start


def _checkpoint_calls(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


def _rows(report: Report, work: Work, num_reps: int, targets: dict[str, float]) -> Iterator[list[str]]:
    trained = {mode: Trained(mode, work) for mode in MODES}
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for rep, mode in in_turn(MODES, num_reps + 1):
        step_s = trained[mode].step_s(rep)
        if rep:  # the first repetition is a warm-up
            times[mode].append(step_s)
    kept = {mode: one.kept_bytes() for mode, one in trained.items()}
    for mode in MODES:
        times_none, target = ratio(times[mode], times[NONE]), targets.get(mode)
        if target is not None:
            report.expect(round(times_none, 2) <= target, f"{mode}: {times_none:.2f} x none, target {target:.2f}")
        yield [
            mode,
            megabytes(kept[mode]),
            f"{kept[mode] / kept[NONE]:.2f}",
            f"{statistics.median(times[mode]) * 1e3:.0f}",
            f"{times_none:.2f}",
            "" if target is None else f"<= {target}",
        ]


if __name__ == "__main__":
    sys.exit(main())
