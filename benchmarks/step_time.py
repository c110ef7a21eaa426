"""The time of a step, compared with torch's own training modes (and DeepSpeed's if it is installed).

    python -m benchmarks.step_time            # 1, 2 and 4 ranks, 5 repetitions: half an hour on 2 cores
    python -m benchmarks.step_time --quick    # 2 ranks, a small model, once: no targets
    python -m benchmarks.step_time --save     # into benchmarks/results/step_time.md

All modes train the same decoder of 25.6M parameters on the same batches (8 sequences of 64 tokens over all ranks, fp32,
fused AdamW), each in new processes, one after the other. Every repetition runs all of them, every other one in the
opposite order. The result is the ratio to DDP (on one rank: to plain PyTorch) within a repetition. Run nothing else at
the same time. It ends with status 1 if a target is missed.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence

from benchmarks._common import Report, Run, check_losses, megabytes, parser, run
from benchmarks._modes import DEEPSPEED, OVER_NETWORK, PARTITA, deepspeed_is_here
from benchmarks._work import Work

WORK = Work(layers=8, width=512, heads=8, ffn_width=1376, batch=8, sequence=64, steps=12, warmup=3)
QUICK_WORK = Work(layers=2, width=128, heads=2, ffn_width=352, batch=8, sequence=32, steps=5, warmup=2)
SINGLE_MODES = ("plain", "FSDP2", *PARTITA)
MODES = ("DDP", "DDP + ZeRO-1", "FSDP2", "FSDP2, kept", *PARTITA, *OVER_NETWORK)
QUICK_MODES = ("DDP", "FSDP2", "partita 1", "partita 3")

# Targets in units of the reference's step, by number of ranks.
TARGETS: dict[int, dict[str, float]] = {
    1: dict.fromkeys(PARTITA, 1.03),
    2: {"partita 1": 1.00, "partita 2": 1.00, "partita 3": 1.10, "partita 3, kept": 1.03},
    4: {"partita 1": 1.00, "partita 2": 1.00, "partita 3": 1.12},
}


def main() -> int:
    made = parser("The time of a step", (1, 2, 4))
    made.add_argument("--reps", type=int, default=5, help="repetitions")
    options = made.parse_args()
    work, num_reps = (QUICK_WORK, 1) if options.quick else (WORK, options.reps)
    worlds, targets = ([2], {}) if options.quick else (options.ranks, TARGETS)
    report = Report("Step time")
    report.begin()
    report.write(_TEXT.format(num_reps=num_reps))
    report.write()
    header = ["ranks", "mode", "ms per step", "ratio", "smallest - largest", "target", "peak MB", "above imports MB"]
    rows = (
        row
        for world in worlds
        for row in _rows(report, world, work, options.only or _modes(world, options.quick), num_reps, targets)
    )
    report.table(header, rows)
    return report.end(options.save)


_TEXT = """Median over {num_reps} repetitions of a step's time and of its ratio to the first mode's in the same
repetition; in a run, a step is as long as its slowest rank's, and the median step counts. *peak MB*: resident memory
of the rank that uses most, over the complete run; *above imports*: without the process's memory before the model was
built. Ranks of partita read each other's memory; *over the network*: with `communication.within_node: network`."""


def _modes(world: int, quick: bool) -> tuple[str, ...]:
    if quick:
        return QUICK_MODES
    return (*(SINGLE_MODES if world == 1 else MODES), *(DEEPSPEED if deepspeed_is_here() else ()))


def _rows(
    report: Report, world: int, work: Work, modes: Sequence[str], num_reps: int, targets: dict[int, dict[str, float]]
) -> Iterator[list[str]]:
    reference = modes[0]
    every: dict[str, list[Run]] = {mode: [] for mode in modes}
    for rep in range(num_reps):
        order = list(reversed(modes)) if rep % 2 else list(modes)
        for mode in order:
            every[mode].append(run(mode, world, work))
            print(f"  {mode} on {world} ranks: {every[mode][-1].step_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
        check_losses({mode: runs[-1] for mode, runs in every.items()}, reference)
    for mode, runs in every.items():
        ratios = [mine.step_s / theirs.step_s for mine, theirs in zip(runs, every[reference], strict=True)]
        ratio, target = statistics.median(ratios), targets.get(world, {}).get(mode)
        if target is not None:
            report.expect(
                round(ratio, 2) <= target, f"{mode} on {world} ranks: {ratio:.2f} x {reference}, target {target:.2f}"
            )
        yield [
            str(world),
            mode,
            f"{statistics.median(one.step_s for one in runs) * 1e3:.1f}",
            f"{ratio:.2f}",
            f"{min(ratios):.2f} - {max(ratios):.2f}",
            "" if target is None else f"<= {target:.2f}",
            megabytes(max(one.peak_bytes for one in runs)),
            megabytes(max(one.work_bytes for one in runs)),
        ]


if __name__ == "__main__":
    sys.exit(main())
