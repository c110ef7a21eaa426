"""Training with all states on disk, of a model whose states are larger than the memory that it may use.

    python -m benchmarks.beyond_memory                   # 1.3 billion parameters: takes 23 GB of disk, minutes
    python -m benchmarks.beyond_memory --folder FOLDER   # on another disk than that of the system's temporary files
    python -m benchmarks.beyond_memory --quick           # a small model, no target
    python -m benchmarks.beyond_memory --save            # into benchmarks/results/beyond_memory.md

It ends with status 1 if a target is missed: at most 6 GB peak resident memory, imports and start included; losses
bitwise equal to those of a run in memory, at a size where both fit; at least 90 % of the bandwidth of bare requests
while the disk is busy.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks._common import RESULTS, ROOT, Report, Run, run
from benchmarks._work import Work
from benchmarks.disk import Bare, describe_filesystem
from partita.memory.allocate import allocate

WORK = Work(
    *(24, 2048, 16, 5504),  # layers, width, heads, width of the feed-forward
    batch=1,
    sequence=64,
    steps=3,
    warmup=1,
    vocab=16_384,
)
QUICK_WORK = replace(WORK, layers=4, width=512, heads=8, ffn_width=1408, vocab=2048)
IN_MEMORY, ON_DISK = "partita 3, from meta", "partita 3, on disk, from meta"
SMALLER_LAYERS = 4
TARGET_PEAK_BYTES, TARGET_SHARE = 6e9, 0.9
# A parameter, its gradient and two moments in fp32.
STATE_BYTES = 16
# Bytes per parameter and step. Read: parameters for forward, backward and update; gradients and moments for the update.
# Written: gradients after backward; parameters and moments after the update.
READ_BYTES, WRITTEN_BYTES = 24, 16
TIMEOUT_S = 880
BARE_REPS = 5


def main() -> int:
    arguments = argparse.ArgumentParser(description="Training beyond memory")
    arguments.add_argument("--quick", action="store_true", help="a small model, no target: does it run?")
    arguments.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    arguments.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the states")
    options = arguments.parse_args()
    work = QUICK_WORK if options.quick else WORK
    report = Report("Beyond memory")
    report.begin()
    model = work.build("meta")
    num_params = sum(param.numel() for param in model.parameters())
    block_bytes = 4 * sum(param.numel() for param in model.blocks[0].parameters())
    _need_disk(options.folder, STATE_BYTES * num_params)
    report.write(
        _TEXT.format(
            billions=num_params / 1e9,
            state_gb=STATE_BYTES * num_params / 1e9,
            filesystem=describe_filesystem(options.folder),
            block_mb=block_bytes / 1e6,
        )
    )
    report.write()
    bare = [_bare_speeds(options.folder, block_bytes)]
    predicted_s = _bare_seconds(bare, READ_BYTES * num_params, WRITTEN_BYTES * num_params)
    moved_gb = (READ_BYTES + WRITTEN_BYTES) * num_params / 1e9
    report.write(
        f"Predicted before the run: {READ_BYTES} + {WRITTEN_BYTES} bytes per parameter and step = {moved_gb:.1f} GB, "
        f"which bare requests move in {predicted_s:.1f} s."
    )
    report.write()
    result = run(ON_DISK, 1, work, folder=options.folder, timeout_s=TIMEOUT_S)
    bare.append(_bare_speeds(options.folder, block_bytes))
    _report_run(report, result, work, bare, options.quick)
    _compare_losses(report, replace(work, layers=SMALLER_LAYERS), options.folder)
    return report.end(options.save)


_TEXT = """A decoder of {billions:.3f} billion parameters in fp32 with AdamW, one process, one sequence of 64 tokens a
step; its states are {state_gb:.1f} GB. The model is built on the meta device; parameters, gradients and moments are
stored on disk ({filesystem}). *bare*: only the `os.preadv` and `os.pwritev` calls for the same blocks of a unit of
{block_mb:.0f} MB, by as many threads, before and after the training, with as many bytes read and written. The speed of
the disk itself varies."""


def _need_disk(folder: Path, num_bytes: float) -> None:
    """Check that the disk has space for the run.

    Raises:
        RuntimeError: too little is free.
    """
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if free < 1.1 * num_bytes:
        raise RuntimeError(
            f"the run needs {1.1 * num_bytes / 1e9:.1f} GB of disk, and {free / 1e9:.1f} GB are free in '{folder}'; "
            "--folder FOLDER chooses another"
        )


Speeds = dict[str, float]


def _bare_speeds(folder: Path, num_bytes: int) -> Speeds:
    """Return the bytes per second of bare requests, the median of a few repetitions."""
    memory = [allocate(num_bytes, torch.uint8, torch.device("cpu")).random_(0, 256) for _ in range(2)]
    bare = Bare(folder, memory)
    moved = {"read": num_bytes, "write": num_bytes, "read beside write": 2 * num_bytes}
    speeds: dict[str, list[float]] = {what: [] for what in moved}
    for _ in range(BARE_REPS):
        for what, num in moved.items():
            begin = time.perf_counter()
            bare.run(what)
            speeds[what].append(num / (time.perf_counter() - begin))
    bare.close()
    return {what: statistics.median(values) for what, values in speeds.items()}


def _bare_seconds(bare: Sequence[Speeds], num_read: float, num_written: float) -> float:
    """Return the time of bare requests for the same bytes.

    Writes run at the same time as reads; the remaining requests run alone.
    """
    mean = {what: statistics.mean(speeds[what] for speeds in bare) for what in bare[0]}
    both = min(num_read, num_written)
    alone = (num_read - both) / mean["read"] + (num_written - both) / mean["write"]
    return 2 * both / mean["read beside write"] + alone


def _report_run(report: Report, result: Run, work: Work, bare: Sequence[Speeds], quick: bool) -> None:
    rank, num_steps = result.ranks[0], work.steps - work.warmup
    disk = rank["disk"]
    step_s, busy_s = rank["measured_s"] / num_steps, disk["busy_s"] / num_steps
    num_read, num_written = disk["bytes_read"] / num_steps, disk["bytes_written"] / num_steps
    bare_s = _bare_seconds(bare, num_read, num_written)
    peak = result.peak_bytes
    rows = [
        ["resident at the peak, start included", f"{peak / 1e9:.2f} GB", "" if quick else "< 6 GB"],
        ["of that, before the model was built", f"{rank['imported_bytes'] / 1e9:.2f} GB", ""],
        ["a step", f"{step_s:.1f} s", ""],
        ["disk busy in a step", f"{busy_s:.1f} s", ""],
        ["read and written in a step", f"{num_read / 1e9:.1f} and {num_written / 1e9:.1f} GB", ""],
        ["the same by bare requests", f"{bare_s:.1f} s", ""],
        ["bandwidth while busy", *_speed(num_read + num_written, busy_s, bare_s), "" if quick else ">= 0.90"],
        ["bandwidth over the step", *_speed(num_read + num_written, step_s, bare_s), ""],
    ]
    report.table(["what", "", "of bare", "target"], [[*row[:-1], *[""] * (4 - len(row)), row[-1]] for row in rows])
    report.table(
        ["state or buffer, at its peak", "MB"],
        [[name, f"{num / 1e6:.0f}"] for name, num in sorted(rank["held_bytes"].items(), key=lambda item: -item[1])],
    )
    report.write(f"Losses: {', '.join(f'{loss:.6f}' for loss in result.losses)}.")
    report.write()
    if not quick:
        report.expect(peak < TARGET_PEAK_BYTES, f"{peak / 1e9:.2f} GB resident at the peak")
        report.expect(bare_s / busy_s >= TARGET_SHARE, f"{bare_s / busy_s:.2f} of the bare bandwidth while busy")


def _speed(num_bytes: float, seconds: float, bare_s: float) -> tuple[str, str]:
    return f"{num_bytes / 1e9 / seconds:.2f} GB/s", f"{bare_s / seconds:.2f}"


def _compare_losses(report: Report, work: Work, folder: Path) -> None:
    """Train a model of fewer layers in memory and on disk, and compare the losses."""
    num_params = sum(param.numel() for param in work.build("meta").parameters())
    runs = [run(mode, 1, work, folder=folder, timeout_s=TIMEOUT_S) for mode in (IN_MEMORY, ON_DISK)]
    same = runs[0].losses == runs[1].losses
    report.expect(same, f"losses in memory {runs[0].losses}, on disk {runs[1].losses}")
    report.write(
        f"With {work.layers} layers ({num_params / 1e9:.3f} billion parameters) losses in memory and on disk are "
        f"{'bitwise equal' if same else 'NOT equal'} ({', '.join(f'{loss:.9g}' for loss in runs[1].losses)}); resident "
        f"at the peak: {runs[0].peak_bytes / 1e9:.2f} GB in memory, {runs[1].peak_bytes / 1e9:.2f} GB on disk."
    )
    report.write()


if __name__ == "__main__":
    sys.exit(main())
