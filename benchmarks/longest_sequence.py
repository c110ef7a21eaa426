"""The longest sequence that trains in 4 GB of memory, by what forward stores for backward; and the bytes per position.

    python -m benchmarks.longest_sequence            # a decoder of 4 layers, 32768 classes: 12 minutes
    python -m benchmarks.longest_sequence --quick    # a small one in 300 MB: no targets
    python -m benchmarks.longest_sequence --save     # into benchmarks/results/longest_sequence.md

Each length is trained in a new process, on one sample of that length after a short one. Lengths double until the
process's resident memory, above that of the imports, exceeds the limit; then it is killed. It ends with status 1 if a
target is missed.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F

import partita
from benchmarks._common import Report, megabytes, parser
from benchmarks._work import OPTIMIZER, Work
from partita.memory.ledger import process_memory
from tests.kit.live_bytes import LiveBytes

SPARSE = {"pattern": "longformer", "window": 1024, "block": 128, "global": 1}
RECOMPUTED: dict[str, Any] = {"activations": {"checkpoint": "units"}}
OFFLOADED: dict[str, Any] = {"activations": {"checkpoint": "units", "offload": "disk"}}
TILED: dict[str, Any] = {**OFFLOADED, "loss": {"tiled": "auto"}, "tiled": {"mlp": ["FeedForward"]}}
PYTORCH, ALL = "PyTorch", "+ sparse attention"
# The config of each mode; PyTorch has no engine.
MODES: dict[str, dict[str, Any]] = {
    PYTORCH: {},
    "partita": {},
    "+ recomputed": RECOMPUTED,
    "+ inputs on disk": OFFLOADED,
    "+ tiled loss and feed-forward": TILED,
    ALL: {**TILED, "attention": SPARSE},
}
SHORT = 64  # positions of the first step
# Targets: length in units of PyTorch's; difference between the slopes of resident memory and of counted bytes.
LENGTH_TARGET, SLOPE_TARGET = 10, 0.1


@dataclass(frozen=True)
class Scale:
    """Sizes of the benchmark.

    Attributes:
        work: the decoder.
        limit: the bytes that training may use.
        first: the first length.
        last_dense: the last length for dense attention, whose time grows with the square of the length.
        last: the last length for sparse attention.
    """

    work: Work
    limit: int
    first: int
    last_dense: int
    last: int


FULL = Scale(
    Work(layers=4, width=256, heads=4, ffn_width=688, batch=1, vocab=32768), 4_000_000_000, 1024, 16384, 131072
)
QUICK = Scale(Work(layers=4, width=64, heads=2, ffn_width=172, batch=1, vocab=4096), 300_000_000, 512, 1024, 2048)


def main() -> int:
    options = parser("The longest sequence", ()).parse_args()
    scale = QUICK if options.quick else FULL
    report = Report("The longest sequence")
    report.begin()
    work = scale.work
    report.write(_TEXT.format(width=work.width, vocab=work.vocab, limit=scale.limit / 1e9))
    report.write()
    header = [
        "kept of the forward",
        "longest",
        "x PyTorch's",
        "resident MB there",
        "KB per position",
        "counted",
        "target",
    ]
    report.table(header, _rows(report, scale, not options.quick))
    return report.end(options.save)


_TEXT = """A decoder of 4 layers of width {width} and {vocab} classes, one sample, fp32, AdamW; modes add up.
*Longest*: lengths double while the peak of the process's resident memory, above that of the imports, stays below
{limit:g} GB (*>=*: longer ones were not tried). *KB per position*: the slope of that peak between the two longest
lengths; *counted*: the slope of the peak bytes of live tensors and of the staging buffers in the memory report, which
background threads use, between the two longest lengths of dense attention."""


def train(mode: str, work: Work, length: int) -> Iterator[int]:
    """Train for two steps: on few positions, which creates the optimizer's states, and on a sample of this length.

    Yield after each step the peak bytes of staging buffers between memory and disk.
    """
    model, generator = work.build(), torch.Generator().manual_seed(length)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    engine = None if mode == PYTORCH else partita.initialize(model, MODES[mode], optimizer=optimizer)
    for num_positions in (SHORT, length):
        tokens = torch.randint(work.vocab, (1, num_positions + 1), generator=generator)
        logits = (engine or model)(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        if engine is None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
        yield 0 if engine is None else engine.memory_report().peak.get(("staging", "host"), 0)
    if engine is not None:
        engine.close()


def _in_process(mode: str, work: Work, length: int, connection: Connection) -> None:
    imported = process_memory()[0]
    connection.send(imported)
    for _ in train(mode, work, length):
        pass
    connection.send(process_memory()[1] - imported)


def peak_bytes(mode: str, work: Work, length: int, limit: int) -> int | None:
    """Return the peak resident memory of a new process above that of the imports; None if it exceeds the limit."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # freed memory returns to the system
    context = multiprocessing.get_context("spawn")
    own, others = context.Pipe()
    process = context.Process(target=_in_process, args=(mode, work, length, others), daemon=True)
    process.start()
    others.close()
    try:
        imported: int = own.recv()
        while not own.poll(0.02):
            if _resident_peak(process.pid) - imported > limit:
                return None
        peak: int = own.recv()
        return peak if peak <= limit else None
    finally:
        process.kill()
        process.join()


def _resident_peak(pid: int | None) -> int:
    try:
        with open(f"/proc/{pid}/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")), 0)
    except OSError:
        return 0


def counted_slope(mode: str, work: Work, lengths: tuple[int, int]) -> float:
    """Return the peak bytes of live tensors and staging in the second step, per position, between two lengths."""
    peaks = []
    for length in lengths:
        steps = train(mode, work, length)
        next(steps)
        with LiveBytes() as live:
            staging = next(steps)
        peaks.append(live.peak + staging)
        list(steps)
    return (peaks[1] - peaks[0]) / (lengths[1] - lengths[0])


def _rows(report: Report, scale: Scale, has_targets: bool) -> Iterator[list[str]]:
    of_pytorch = 0
    for mode in MODES:
        last = scale.last if mode == ALL else scale.last_dense
        peaks, length, open_end = dict[int, int](), scale.first, ">= "
        while length <= last:
            start = time.perf_counter()
            peak = peak_bytes(mode, scale.work, length, scale.limit)
            found = "more" if peak is None else megabytes(peak)
            print(f"{mode}, {length} positions: {found} MB, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            if peak is None:
                open_end = ""
                break
            peaks[length] = peak
            length *= 2
        longest = max(peaks, default=0)
        of_pytorch = of_pytorch or longest
        slope = (peaks[longest] - peaks[longest // 2]) / (longest // 2) if longest // 2 in peaks else 0.0
        # Short lengths are not used: their peak is at another point of the step.
        top = max(min(longest, scale.last_dense), 2 * scale.first)
        counted = counted_slope(mode, scale.work, (top // 2, top))
        target = []
        if has_targets and slope:
            target.append(f"within {SLOPE_TARGET:.0%}")
            off = abs(slope / counted - 1)
            report.expect(off <= SLOPE_TARGET, f"{mode}: {off:.0%} off the counted bytes per position")
        if has_targets and mode == ALL:
            target.append(f">= {LENGTH_TARGET} x PyTorch's")
            report.expect(longest >= LENGTH_TARGET * of_pytorch, f"{longest / of_pytorch:.0f} x PyTorch's longest")
        yield [
            mode,
            f"{open_end}{longest}",
            f"{longest / of_pytorch:.0f}",
            megabytes(peaks.get(longest, 0)),
            f"{slope / 1e3:.1f}",
            f"{counted / 1e3:.1f}",
            ", ".join(target),
        ]


if __name__ == "__main__":
    sys.exit(main())
