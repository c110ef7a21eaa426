"""Codecs on the CPU: times of encoding and decoding, compared with the bandwidth of the memory.

    python -m benchmarks.codecs            # 100M values, 1 and 2 threads
    python -m benchmarks.codecs --quick    # does it run?
    python -m benchmarks.codecs --save     # into benchmarks/results/codecs.md

The floor is the time of reading the values and writing the codes, or the reverse, at the bandwidth of torch's copies in
the same run. The values are processed in slices of four million, one after the other, so that no slice is in a cache
when it is processed; the shortest time of a slice counts. It ends with status 1 if 8 or 4 bits take more than twice the
floor.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks._common import RESULTS, ROOT, Report
from partita.kernels.codec import decode, encode
from partita.kernels.codecs import CODECS, Codec
from partita.memory.capacity import usable_cores

SLICE = 1 << 22
VALUE_BYTES = 4
TARGETS = {"int8": 2.0, "int4": 2.0}


def main() -> int:
    made = argparse.ArgumentParser(description="codecs on the CPU")
    made.add_argument("--quick", action="store_true", help="two slices: does it run?")
    made.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    options = made.parse_args()
    num, reps = (2, 1) if options.quick else (24, 20)
    report = Report("Codecs on the CPU")
    report.begin()
    report.write(f"{num * SLICE / 1e6:.0f}M values in {num} slices, each slice's shortest of {reps} repetitions; ns a")
    report.write("value. Values are rounded at random where the codec can.")
    report.write()
    values, out = ([torch.randn(SLICE) for _ in range(num)] for _ in range(2))
    for threads in (count for count in (1, 2) if count <= usable_cores()):
        torch.set_num_threads(threads)
        pairs = list(zip(values, out, strict=True))
        copying = measure([partial(to.copy_, given) for given, to in pairs], reps)
        rate = 2 * VALUE_BYTES / copying
        report.write(f"{threads} threads: copies move {rate:.1f} GB/s.")
        report.write()
        rows = []
        for codec in CODECS.values():
            to_codes, to_values = (measure(runs, reps) for runs in runs_of(codec, pairs, threads))
            code_bytes = codec.num_bytes(SLICE) / SLICE
            ratio = (to_codes + to_values) / (2 * (VALUE_BYTES + code_bytes) / rate)
            rows.append([codec.name, f"{VALUE_BYTES / code_bytes:.1f}", f"{to_codes:.3f}", f"{to_values:.3f}"])
            rows[-1].append(f"{ratio:.2f}")
            if not options.quick and codec.name in TARGETS:
                target = TARGETS[codec.name]
                report.expect(ratio <= target, f"{codec.name}, {threads} threads: {ratio:.2f} x the floor")
        report.table(["codec", "times fewer bytes", "encode", "decode", "times the floor"], rows)
    return report.end(options.save)


Runs = list[Callable[[], object]]


def runs_of(codec: Codec, pairs: list[tuple[Tensor, Tensor]], threads: int) -> tuple[Runs, Runs]:
    """Return the functions that encode and decode each slice."""
    codes = [torch.empty(codec.num_bytes(SLICE), dtype=torch.uint8) for _ in pairs]
    seed = 1 if codec.unbiased else None
    encoding: Runs = [
        partial(encode, codec, given, coded, seed=seed, threads=threads)
        for (given, _), coded in zip(pairs, codes, strict=True)
    ]
    decoding: Runs = [
        partial(decode, codec, coded, to, threads=threads) for (_, to), coded in zip(pairs, codes, strict=True)
    ]
    return encoding, decoding


def measure(runs: Runs, reps: int) -> float:
    """Return the nanoseconds per value, from each slice's shortest repetition."""
    best = [math.inf] * len(runs)
    for _ in range(reps):
        for place, run in enumerate(runs):
            start = time.perf_counter()
            run()
            best[place] = min(best[place], time.perf_counter() - start)
    return sum(best) / len(best) / SLICE * 1e9


if __name__ == "__main__":
    sys.exit(main())
