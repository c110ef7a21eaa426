"""Steps on the other axes: tensor, pipeline and sequence parallelism beside torch's own, alone and with data.

    python -m benchmarks.parallel            # 2 and 4 ranks, 3 repetitions
    python -m benchmarks.parallel --quick    # a small model, once: no targets
    python -m benchmarks.parallel --save     # into benchmarks/results/parallel.md

All modes train the same decoder on the same global batch; the pipelines in 4 micro-batches. Each row of partita's is
compared with the peer in the row's name, in the same repetition. Run nothing else beside it.
"""

import statistics
import sys
from collections.abc import Iterator

from benchmarks._common import Report, Run, check_losses, megabytes, parser, run
from benchmarks._work import Work

WORK = Work(layers=8, width=512, heads=8, ffn_width=1376, batch=8, sequence=128, steps=8, warmup=3)
QUICK_WORK = Work(layers=2, width=64, heads=2, ffn_width=96, batch=8, sequence=32, steps=3, warmup=1)

# By number of ranks: each of partita's modes and the peer's that does the same; None where torch has nothing.
PAIRS: dict[int, dict[str, str | None]] = {
    2: {
        "partita tensor 2": "torch tensor 2",
        "partita pipeline 2": "torch pipeline 2",
        "partita sequence 2": "torch context 2",
    },
    4: {
        "partita tensor 2 x data, stage 3": "torch tensor 2 x FSDP2",
        "partita pipeline 2 x data, stage 3": "torch pipeline 2 x FSDP2",
        "partita sequence 2 x data, stage 3": None,
        "partita tensor 2 x pipeline 2": None,
    },
}
TARGET = 1.00  # no slower than the peer


def main() -> int:
    made = parser("Steps on other axes than data", (2, 4))
    made.add_argument("--reps", type=int, default=3, help="repetitions")
    options = made.parse_args()
    work, num_reps = (QUICK_WORK, 1) if options.quick else (WORK, options.reps)
    report = Report("Parallel axes")
    report.begin()
    report.write(_TEXT.format(num_reps=num_reps))
    report.write()
    header = ["ranks", "mode", "ms a step", "x DDP", "x its peer", "peak MB above imports", "refused"]
    worlds = [2] if options.quick else options.ranks
    report.table(header, (row for world in worlds for row in _rows(report, world, work, num_reps, options.quick)))
    return report.end(options.save)


_TEXT = """Median over {num_reps} repetitions of a step's time, of its ratio to DDP's (the same global batch, all ranks
along data) and to its peer's in the same repetition; memory of the rank that takes most."""


def _rows(report: Report, world: int, work: Work, num_reps: int, quick: bool) -> Iterator[list[str]]:
    pairs = PAIRS[world]
    modes = ["DDP", *(peer for peer in pairs.values() if peer), *pairs]
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    refused = dict[str, str]()
    for rep in range(num_reps):
        for mode in modes if rep % 2 == 0 else modes[::-1]:
            if mode in refused:
                continue
            try:
                runs[mode].append(run(mode, world, work))
            except RuntimeError as error:
                if mode.startswith(("partita", "DDP")):
                    raise
                refused[mode] = str(error).strip().splitlines()[-1][:120]
                continue
            print(f"  {mode} on {world} ranks: {runs[mode][-1].step_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
        check_losses({mode: each[-1] for mode, each in runs.items() if each and mode != "torch context 2"}, "DDP")
    peer_of = {mode: peer for mode, peer in pairs.items() if peer not in refused}
    for mode, own in runs.items():
        if mode in refused:
            yield [str(world), mode, "", "", "", "", refused[mode]]
            continue
        beside = peer_of.get(mode)
        ratio = _ratio(own, runs[beside]) if beside else None
        if ratio is not None and not quick:
            report.expect(round(ratio, 2) <= TARGET, f"{mode} on {world} ranks: {ratio:.2f} x {beside}")
        yield [
            str(world),
            mode,
            f"{statistics.median(one.step_s for one in own) * 1e3:.1f}",
            f"{_ratio(own, runs['DDP']):.2f}",
            "" if ratio is None else f"{ratio:.2f}",
            megabytes(max(one.work_bytes for one in own)),
            "",
        ]


def _ratio(mine: list[Run], theirs: list[Run]) -> float:
    return statistics.median(one.step_s / other.step_s for one, other in zip(mine, theirs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
