"""Steps with tensor, pipeline and sequence parallelism, compared with torch's own, with and without data parallelism.

    python -m benchmarks.parallel            # 2 and 4 ranks, 3 repetitions
    python -m benchmarks.parallel --quick    # a small model, once: no targets
    python -m benchmarks.parallel --save     # into benchmarks/results/parallel.md

All modes train the same decoder on the same global batch; pipelines use 4 micro-batches. Each row of partita is
compared with the peer that it names, in the same repetition. Run nothing else at the same time.
"""

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator

from benchmarks._common import Report, Run, check_losses, in_turn, megabytes, opened, ratio, run
from benchmarks._work import Work

WORK = Work(layers=8, width=512, heads=8, ffn_width=1376, batch=8, sequence=128, steps=8, warmup=3)
QUICK_WORK = Work(layers=2, width=64, heads=2, ffn_width=96, batch=8, sequence=32, steps=3, warmup=1)

# Modes of partita by number of ranks, and the equivalent modes of other libraries (if there are any).
PAIRS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "partita tensor 2": ("torch tensor 2",),
        "partita pipeline 2": ("torch pipeline 2", "DeepSpeed pipeline 2"),
        "partita sequence 2": ("torch context 2",),
    },
    4: {
        "partita tensor 2 x data, stage 3": ("torch tensor 2 x FSDP2",),
        "partita pipeline 2 x data, stage 1": ("DeepSpeed pipeline 2 x ZeRO-1",),
        "partita pipeline 2 x data, stage 3": ("DeepSpeed pipeline 2 x ZeRO-3",),
        "partita pipeline 2 x data, stage 3, once": ("torch pipeline 2 x FSDP2",),
        "partita sequence 2 x data, stage 3": (),
        "partita tensor 2 x pipeline 2": ("torch tensor 2 x pipeline 2",),
    },
}
TARGET = 1.00  # at most as slow as the peer
OURS, DDP, CONTEXT = "partita", "DDP", "torch context 2"  # the loss of CONTEXT is that of a rank's own positions


def main() -> int:
    report, options = opened("Parallel axes", (2, 4), reps=3)
    report.write(_TEXT.format(num_reps=options.reps))
    report.write()
    header = ["ranks", "mode", "ms per step", "x DDP", "x its peer", "peak MB above imports", "refused"]
    report.table(header, (row for world in options.ranks for row in _rows(report, world, options)))
    return report.end(options.save)


_TEXT = """Median over {num_reps} repetitions of a step's time, of its ratio to DDP's (the same global batch, all ranks
along data) and to its peer's in the same repetition; memory of the rank that uses most."""


def _rows(report: Report, world: int, options: Namespace) -> Iterator[list[str]]:
    pairs, work = PAIRS[world], QUICK_WORK if options.quick else WORK
    modes = options.only or [DDP, *(peer for peers in pairs.values() for peer in peers), *pairs]
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    refused = dict[str, str]()
    for _, mode in in_turn(modes, options.reps):
        if mode not in refused:
            try:
                runs[mode].append(run(mode, world, work))
            except RuntimeError as error:
                if mode.startswith((OURS, DDP)):
                    raise
                refused[mode] = str(error).strip().splitlines()[-1][:120]
                continue
            print(f"  {mode} on {world} ranks: {runs[mode][-1].step_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
    trained = {mode: own for mode, own in runs.items() if own}
    check_losses({mode: own[-1] for mode, own in trained.items() if mode != CONTEXT}, modes[0])
    step_s = {mode: [one.step_s for one in own] for mode, own in trained.items()}
    for mode in modes:
        if mode in refused:
            yield [str(world), mode, "", "", "", "", refused[mode]]
            continue
        beside = {peer: ratio(step_s[mode], step_s[peer]) for peer in pairs.get(mode, ()) if peer in step_s}
        for peer, times in beside.items():
            report.expect(options.quick or round(times, 2) <= TARGET, f"{mode} on {world} ranks: {times:.2f} x {peer}")
        yield [
            str(world),
            mode,
            f"{statistics.median(step_s[mode]) * 1e3:.1f}",
            f"{ratio(step_s[mode], step_s[modes[0]]):.2f}",
            ", ".join(f"{times:.2f}" for times in beside.values()),
            megabytes(max(one.work_bytes for one in trained[mode])),
            "",
        ]


if __name__ == "__main__":
    sys.exit(main())
