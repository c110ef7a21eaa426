"""The time of block-sparse attention, forward and backward, compared with torch's dense causal attention.

    python -m benchmarks.sparse_attention            # 2k to 32k positions, 2 heads, 3 repetitions: 10 minutes
    python -m benchmarks.sparse_attention --quick    # short sequences, once: no targets
    python -m benchmarks.sparse_attention --save     # into benchmarks/results/sparse_attention.md

Every repetition runs each mode once, every other one in the opposite order. It ends with status 1 if a target is
missed. FlexAttention has no backward on the CPU and is not compared.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._common import Report, in_turn, opened, ratio
from partita.attention import Layout, block_sparse
from partita.attention.block_pairs import block_pairs
from partita.attention.picture import dense_pairs
from partita.attention.segments import Sizes, whole_samples
from partita.memory.capacity import usable_cores

LENGTHS = (2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (512, 1024)
HEADS, WIDTH, WINDOW = 2, 64, 1024
DENSE = "dense"
# The mode with targets, the target of its speed-up divided by the reduction of pairs, and that of its speed-up.
CHOSEN, SHARE_TARGET, SPEED_TARGET = "longformer, blocks of 256", 0.7, 6.0


def layouts(window: int) -> dict[str, Layout]:
    return {
        CHOSEN: Layout("longformer", 256, window, num_global=1),
        "longformer, blocks of 128": Layout("longformer", 128, window, num_global=1),
        "longformer, blocks of 64": Layout("longformer", 64, window, num_global=2),
        "sliding, blocks of 128": Layout("sliding", 128, window),
        "bigbird, blocks of 128": Layout("bigbird", 128, window // 2, num_global=1, num_random=3),
        "fixed, blocks of 128": Layout("fixed", 128, window, num_global=1),
    }


def main() -> int:
    report, options = opened("Block-sparse attention", reps=3)
    lengths, window = (QUICK_LENGTHS, 128) if options.quick else (LENGTHS, WINDOW)
    torch.set_num_threads(usable_cores())
    report.write(_TEXT.format(heads=HEADS, width=WIDTH, window=window, threads=usable_cores(), num_reps=options.reps))
    report.write()
    header = ["positions", "attention", "pairs, x fewer", "ms", "x dense's speed", "of its share", "target"]
    report.table(header, _rows(report, lengths, window, options.reps, not options.quick))
    return report.end(options.save)


_TEXT = """Forward and backward of {heads} heads of width {width} in fp32 on {threads} threads; a window of {window}
positions (bigbird: half of it). *Pairs*: of positions in dense causal attention, divided by those in computed blocks;
*of its share*: the speed-up divided by that. Median over {num_reps} repetitions."""


def _timed(call: Callable[[], Tensor], given: list[Tensor], weights: Tensor) -> float:
    start = time.perf_counter()
    torch.autograd.grad(call(), given, weights)
    return time.perf_counter() - start


def _rows(
    report: Report, lengths: tuple[int, ...], window: int, num_reps: int, has_targets: bool
) -> Iterator[list[str]]:
    torch.manual_seed(0)
    for length in lengths:
        given = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
        weights = torch.randn(1, HEADS, length, WIDTH)
        chosen = layouts(window)
        calls: dict[str, Callable[[], Tensor]] = {
            DENSE: lambda given=given: F.scaled_dot_product_attention(*given, is_causal=True)
        }
        calls |= {name: lambda given=given, layout=each: block_sparse(*given, layout) for name, each in chosen.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for rep, name in in_turn(calls, num_reps + 1):
            seconds = _timed(calls[name], given, weights)
            if rep:  # the first repetition is a warm-up
                times[name].append(seconds)
        sizes = Sizes(1, length, length)
        yield [str(length), DENSE, "", f"{statistics.median(times[DENSE]) * 1e3:.0f}", "", "", ""]
        for name, layout in chosen.items():
            computed = len(block_pairs(layout, sizes, whole_samples(sizes)).row) * layout.block**2
            fewer = dense_pairs(True, length) / computed
            speed = ratio(times[DENSE], times[name])
            share, target = speed / fewer, ""
            if has_targets and name == CHOSEN and length >= 16384:
                target = f"share >= {SHARE_TARGET}"
                report.expect(share >= SHARE_TARGET, f"{name} at {length}: {share:.2f} of its share")
                if length >= 32768:
                    target += f", speed >= {SPEED_TARGET:g}"
                    report.expect(speed >= SPEED_TARGET, f"{name} at {length}: {speed:.1f} x dense's speed")
            milliseconds = f"{statistics.median(times[name]) * 1e3:.0f}"
            yield [str(length), name, f"{fewer:.1f}", milliseconds, f"{speed:.1f}", f"{share:.2f}", target]


if __name__ == "__main__":
    sys.exit(main())
