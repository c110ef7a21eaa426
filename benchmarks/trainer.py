"""transformers' Trainer on partita: the time of a step compared with the bare engine, and memory during loading.

    python -m benchmarks.trainer            # 2 ranks train, 4 ranks load 200M parameters: 5 GB must be free
    python -m benchmarks.trainer --quick    # small models: no targets
    python -m benchmarks.trainer --save     # into benchmarks/results/trainer.md

It ends with status 1 if a target is missed: a step in the Trainer at most 1.03 times as long as the engine's, and,
while ranks load a model, at most 1.3 times its bytes on the node.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from benchmarks._common import ROOT, TIMEOUT_S, Report, megabytes, parser
from benchmarks._trainer_rank import Options
from partita.memory.capacity import usable_cores

STEPS = Options(layers=6, width=512)
LOADED = Options(layers=26, width=768)
QUICK_STEPS = Options(layers=2, width=128, steps=5, warmup=2, repetitions=1)
QUICK_LOADED = Options(layers=2, width=256)
STEP_TARGET, MEMORY_TARGET = 1.03, 1.3
POLL_S = 0.01


def main() -> int:
    options = parser("Training under transformers' Trainer", (2,)).parse_args()
    trained, loaded = (QUICK_STEPS, QUICK_LOADED) if options.quick else (STEPS, LOADED)
    report = Report("Trainer")
    report.begin()
    report.write(_TEXT)
    report.write()
    header = ["ranks", "stage", "engine ms per step", "Trainer ms per step", "ratio", "smallest - largest", "target"]
    parts = options.only or ["steps", "loading"]
    worlds = [2] if options.quick else options.ranks
    if "steps" in parts:
        report.table(header, (row for world in worlds for row in _steps(report, world, trained, options.quick)))
    num_ranks = 2 if options.quick else 4
    header = ["ranks", "stage", "parameters M", "model MB", "node's peak MB", "of it buffers MB", "ratio", "target"]
    if "loading" in parts:
        report.table(header, _loading(report, num_ranks, loaded, options.quick))
    return report.end(options.save)


_TEXT = """Llamas in fp32 with torch's fused AdamW, at stage 3 and 1. *ms per step*: the median over the steps of a run
and then over the repetitions; both loops run in the same processes, in turn, and the ratio is that within a
repetition. A step of the Trainer lasts from the end of one to the end of the next, with its data loader and callbacks.
*node's peak*: private memory of all ranks, above that before `from_pretrained`, until the model is sharded; *buffers*:
at most so much of it is buffers of gathered units, in training as in loading: some blocks per rank, whatever the
model's depth. Mapped file pages, which the system can reclaim at any time, are not counted."""


def _steps(report: Report, world: int, options: Options, quick: bool) -> Iterator[list[str]]:
    for stage in (3, 1):
        with tempfile.TemporaryDirectory() as folder:
            ranks = _run("steps", world, Options(**(asdict(options) | {"stage": stage})), Path(folder))
        every = {name: [_slowest(ranks, name, one) for one in range(options.repetitions)] for name in ranks[0]}
        ratios = [mine / theirs for mine, theirs in zip(every["Trainer"], every["engine"], strict=True)]
        ratio = statistics.median(ratios)
        report.expect(quick or round(ratio, 2) <= STEP_TARGET, f"a step at stage {stage}: {ratio:.3f} x the engine's")
        yield [
            str(world),
            str(stage),
            *(f"{statistics.median(every[name]) * 1e3:.1f}" for name in ("engine", "Trainer")),
            f"{ratio:.3f}",
            f"{min(ratios):.3f} - {max(ratios):.3f}",
            "" if quick else f"<= {STEP_TARGET}",
        ]


def _slowest(ranks: list[dict[str, Any]], name: str, repetition: int) -> float:
    """Return the median step; a step ends when its slowest rank ends."""
    return statistics.median(map(max, zip(*(rank[name][repetition] for rank in ranks), strict=True)))


def _loading(report: Report, world: int, options: Options, quick: bool) -> Iterator[list[str]]:
    for stage in (3, 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = LlamaForCausalLM(options.config())
            num_params = sum(param.numel() for param in model.parameters())
            model.save_pretrained(folder / "model")
            del model
            with _Watch(folder) as watch:
                ranks = _run("load", world, Options(**(asdict(options) | {"stage": stage})), folder)
        # Below stage 3 every rank stores the full model: reading must not add to it.
        kept = 4 * num_params * (1 if stage == 3 else world)
        ratio = watch.peak / kept
        report.expect(quick or ratio <= MEMORY_TARGET, f"loading at stage {stage}: {ratio:.2f} x the ranks' states")
        yield [
            str(world),
            str(stage),
            f"{num_params / 1e6:.1f}",
            megabytes(kept),
            megabytes(watch.peak),
            megabytes(sum(rank["buffer_bytes"] for rank in ranks)),
            f"{ratio:.2f}",
            "" if quick else f"<= {MEMORY_TARGET}",
        ]


class _Watch:
    """Watcher of the private memory of the processes that load a model.

    Processes mark their beginning and end by files in a folder. ``peak`` is the maximum in between, above the memory at
    the beginning.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._over = folder, threading.Event()
        self._thread = threading.Thread(target=self._measure)
        self.peak = 0

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _measure(self) -> None:
        before: dict[str, int] = {}
        while not self._over.wait(POLL_S):
            began = [path.name.removeprefix("began-") for path in self._folder.glob("began-*")]
            for pid in began:
                before.setdefault(pid, _private_bytes(pid))
            if not any(self._folder.glob("ended-*")):
                self.peak = max(self.peak, sum(_private_bytes(pid) - before[pid] for pid in began))


def _private_bytes(pid: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return sum(int(sizes[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem") if key in sizes)  # none at exit


def _run(way: str, world: int, options: Options, folder: Path) -> list[dict[str, Any]]:
    """Run the ranks with torchrun, and return their measurements."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [*launch, "-m", "benchmarks._trainer_rank", way, json.dumps(asdict(options)), str(folder)]
    own = {"OMP_NUM_THREADS": str(max(1, usable_cores() // world)), "GLOO_SOCKET_IFNAME": "lo"}
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{way} on {world} ranks failed after {time.monotonic() - began:.0f} s:\n{done.stderr}")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


if __name__ == "__main__":
    sys.exit(main())
