"""Overlap in a step with offload, as a trace and as shares: python -m benchmarks.gpu.timeline --save

torch's profiler records the device's kernels and copies. Updates on the host are measured from outside, around the
optimizer's step on each unit, and added to the same trace (`benchmarks/results/timeline-*.json.gz`, for
chrome://tracing or ui.perfetto.dev). A copy or an update is hidden while a kernel runs. Without a GPU (`--quick`), the
caller inside forward and backward counts as computing, except while it waits for another thread.
"""

import gzip
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks._common import RESULTS, Report
from benchmarks.gpu._attempt import batch
from benchmarks.gpu._common import SIZES, SMALL, chosen, device_here, is_tiny, num_params, parser, place
from benchmarks.gpu._modes import MODES, PARTITA, Setting, partita_engine
from partita.memory import accelerator, streams
from partita.optim.optimizer import Snapshot

DEFAULT = ["optimizer on host", "everything on host", "lean, everything on host"]
CLOCK = "benchmark clock"
WARMUP, STEPS = 2, 2

Span = tuple[float, float]  # microseconds


class Watch:
    """Time spans on this process's clock, by kind."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spans.setdefault(kind, []).append((begin * 1e6, time.perf_counter() * 1e6))

    def around(self, kind: str, call: Callable[..., Any], *, caller_only: bool = False) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if caller_only and threading.current_thread() is not threading.main_thread():
                return call(*args, **kwargs)
            with self.span(kind):
                return call(*args, **kwargs)

        return watched


def merged(spans: list[Span]) -> list[Span]:
    """Return the union of the spans, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(spans: list[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def common(one: list[Span], other: list[Span]) -> list[Span]:
    """Return the intersection of two unions."""
    out, at = [], 0
    for begin, end in one:
        while at < len(other) and other[at][1] <= begin:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end:
            out.append((max(begin, other[place][0]), min(end, other[place][1])))
            place += 1
    return out


def without(spans: list[Span], holes: list[Span]) -> list[Span]:
    """Return the spans without the holes."""
    if not spans:
        return []
    edges = [(spans[0][0], spans[0][0]), *holes, (spans[-1][1], spans[-1][1])]
    gaps = [(before[1], after[0]) for before, after in pairwise(edges) if before[1] < after[0]]
    return common(spans, gaps)


def record(setting: Setting, mode: str, tokens: int, sequence: int) -> tuple[Watch, dict[str, Any], float]:
    """Train; return the watched spans, the profiler's trace, and the offset of its clock from the watch's."""
    watch, device = Watch(), setting.device
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    engine = partita_engine(setting, **MODES[mode].config)
    step_of, wait_of = Snapshot.step, streams._Job.wait
    with (
        mock.patch.object(Snapshot, "step", watch.around("update", step_of)),
        mock.patch.object(streams._Job, "wait", watch.around("wait", wait_of, caller_only=True)),
        engine,
    ):

        def train(step: int) -> None:
            rows = batch(tokens, sequence, device, step)
            with watch.span("caller"):
                loss = engine(*rows)
                engine.backward(loss)
            engine.step()

        for step in range(WARMUP):
            train(step)
        engine.zero_grad()  # waits for the updates
        watch.spans.clear()
        with profile(activities=activities) as profiler:
            begin = time.perf_counter() * 1e6
            with record_function(CLOCK):
                pass
            for step in range(STEPS):
                train(step)
            engine.zero_grad()
            accelerator.wait_for_all(device)
        watched = watch.spans
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    mark = next(event for event in trace["traceEvents"] if event.get("name") == CLOCK and event.get("ph") == "X")
    watch.spans = watched
    return watch, trace, float(mark["ts"]) - begin


def device_spans(trace: dict[str, Any]) -> dict[str, list[Span]]:
    """Return the device's kernels and copies, by kind."""
    spans: dict[str, list[Span]] = {"kernels": [], "to the device": [], "to the host": []}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        category, span = event.get("cat", ""), (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if category == "kernel":
            spans["kernels"].append(span)
        elif category == "gpu_memcpy":
            for sign, kind in (("HtoD", "to the device"), ("DtoH", "to the host")):
                if sign in event["name"]:
                    spans[kind].append(span)
    return spans


def add(trace: dict[str, Any], kind: str, spans: list[Span]) -> None:
    """Add watched spans to the trace, as another process."""
    for begin, end in spans:
        event = {"name": kind, "cat": "partita", "ts": begin, "dur": end - begin}
        trace["traceEvents"].append({"ph": "X", "pid": "partita", "tid": kind, **event})


def save(trace: dict[str, Any], mode: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"timeline-{mode.replace(',', '').replace(' ', '-')}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def shares(report: Report, setting: Setting, mode: str, sizes: tuple[int, int], keep: bool) -> list[list[str]]:
    """Return a table row for each kind of work that can overlap with computation, and one for computation."""
    watch, trace, shift = record(setting, mode, *sizes)
    own = {kind: merged([(b + shift, e + shift) for b, e in spans]) for kind, spans in watch.spans.items()}
    for kind, spans in own.items():
        add(trace, kind, spans)
    found = {kind: merged(spans) for kind, spans in device_spans(trace).items()}
    on_gpu = setting.device.type == "cuda"
    computes = found.pop("kernels") if on_gpu else without(own["caller"], own.get("wait", []))
    report.expect(bool(computes), f"{mode}: something computes")
    report.expect(bool(own.get("update")), f"{mode}: updates were seen")
    rows = []
    for kind, spans in {**(found if on_gpu else {}), "update on the host": own.get("update", [])}.items():
        total, hidden = length(spans), length(common(spans, computes))
        share = f"{hidden / total:.0%}" if total else "-"
        rows.append([mode, kind, f"{total / STEPS / 1e3:.2f}", f"{hidden / STEPS / 1e3:.2f}", share])
    rows.append([mode, "compute", f"{length(computes) / STEPS / 1e3:.2f}", "", ""])
    if keep:
        print(f"  {save(trace, mode)}", file=sys.stderr)
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--size", choices=list(SIZES), default="3B")
    made.add_argument("--tokens", type=int, default=16384)
    arguments = made.parse_args()
    device, tiny = device_here(arguments), is_tiny(arguments)
    setting = Setting(SMALL if tiny else SIZES[arguments.size], device, arguments.path)
    report = Report("What overlaps in a step with offload")
    report.begin()
    report.write(f"{place(device)}; {num_params(setting.shape) / 1e9:.3g}e9 parameters.")
    report.write()
    rows = []
    for mode in (name for name in chosen(arguments.mode, PARTITA) if arguments.mode or name in DEFAULT):
        sizes = (256, 64) if tiny else (arguments.tokens, 4096)
        rows += shares(report, setting, mode, sizes, arguments.save)
        accelerator.reclaim(device)
    report.table(["mode", "what", "ms per step", "ms hidden", "hidden"], rows)
    return report.end(arguments.save)


if __name__ == "__main__":
    sys.exit(main())
