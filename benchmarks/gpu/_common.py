"""Shared parts of the GPU benchmarks: decoders by size, attempts in separate processes, and their outcomes."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import ROOT
from partita.memory import accelerator
from partita.memory.capacity import host_memory
from partita.train.decoder import DecoderShape

POLL_S = 0.05
# Host memory that an attempt must leave to the system.
RESERVE_BYTES = 6 * 2**30
LAST_CHARACTERS = 1500
SMALL = DecoderShape(layers=2, width=64, heads=2, kv_heads=1, ffn_width=128)


def decoder(layers: int, width: int, ffn_width: int) -> DecoderShape:
    """Return a decoder with heads of width 128, and 8 key and value heads.

    Its vocabulary is small, so that nearly all weights are in blocks.
    """
    return DecoderShape(layers, width, width // 128, 8, ffn_width)


SIZES = {
    "1B": decoder(22, 2048, 5632),
    "3B": decoder(28, 3072, 8192),
    "7B": decoder(36, 4096, 11008),
    "13B": decoder(48, 5120, 13824),
    "28B": decoder(56, 6656, 17920),
    "40B": decoder(60, 8192, 20480),
}


def num_params(shape: DecoderShape) -> int:
    attention = shape.width * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    block = attention + 3 * shape.width * shape.ffn_width + 2 * shape.width
    return shape.layers * block + 2 * shape.vocab * shape.width + shape.width


def model_flops(shape: DecoderShape, tokens: int, length: int) -> float:
    """Return a step's FLOPs without recomputation: 6 per parameter and token, and causal attention's two products."""
    attention = 6.0 * shape.layers * shape.heads * shape.head_dim * length * tokens
    return 6.0 * num_params(shape) * tokens + attention


@dataclass(frozen=True)
class Job:
    """One attempt to train.

    Attributes:
        mode: a mode of :mod:`benchmarks.gpu._modes`.
        shape: the decoder.
        tokens: the numbers of tokens per step to try, in order.
        length: the maximum length of a sequence.
        path: the folder of the disk tier.
        simulated: use the simulated accelerator.
    """

    mode: str
    shape: DecoderShape
    tokens: tuple[int, ...]
    length: int
    steps: int = 3
    warmup: int = 1
    path: str | None = None
    simulated: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields = json.loads(text)
        return cls(**fields | {"shape": DecoderShape(**fields["shape"]), "tokens": tuple(fields["tokens"])})


@dataclass
class Outcome:
    """The outcome of an attempt. ``stopped`` is empty or one of: device, host, disk, time, absent, error."""

    stopped: str
    seconds: float
    steps: list[dict[str, Any]] = field(default_factory=list)  # one for each number of tokens that was reached
    host_peak: int = 0
    said: str = ""

    @property
    def why(self) -> str:
        names = {"device": "device memory", "host": "host memory", "disk": "disk space", "time": "time"}
        last = self.said.strip().splitlines()[-1:] or [""]
        return names.get(self.stopped, f"{self.stopped}: {last[0][:100]}" if self.stopped else "")


def attempt(job: Job, seconds: float, host_bytes: int) -> Outcome:
    """Run a job in a separate process, and kill it if it uses too much time or host memory."""
    begin, stopped, peak = time.monotonic(), "", 0
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        result = Path(folder, "result.jsonl")
        command = [sys.executable, "-m", "benchmarks.gpu._attempt", job.to_json(), str(result)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                resident, available = _resident(process.pid), host_memory()[1]
                peak = max(peak, resident)
                if resident > host_bytes or available < RESERVE_BYTES // 6:
                    stopped = "host"
                elif time.monotonic() - begin > seconds:
                    stopped = "time"
                if stopped:
                    break
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        text = said.read()[-LAST_CHARACTERS:]
        lines = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
    steps = [line for line in lines if "tokens" in line]
    ends = [line["stopped"] for line in lines if "stopped" in line]
    if not stopped:
        stopped = ends[-1] if ends else ("host" if process.returncode == -signal.SIGKILL else "error")
    return Outcome(stopped, time.monotonic() - begin, steps, peak, text)


def _resident(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


class Clock:
    """Countdown of the time that a command has."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that these benchmarks have in common."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a tiny model, on the CPU if there is no GPU: does it run?")
    add_simulated(made)
    made.add_argument("--save", action="store_true", help="write the report into benchmarks/results/")
    made.add_argument("--seconds", type=float, default=570.0, help="start nothing that would not end within this time")
    made.add_argument("--mode", nargs="+", default=None, metavar="MODE", help="the modes to run, by name")
    made.add_argument("--host-gib", type=float, default=None, help="host memory to use at most (by default all but 6)")
    made.add_argument("--path", default=None, help="folder of the disk tier")
    return made


def add_simulated(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--simulated", action="store_true", help="a tiny model, on the simulated accelerator: does every line run?"
    )


def is_tiny(arguments: argparse.Namespace) -> bool:
    """Return True if the figures mean nothing: the sizes only show that the script runs."""
    return bool(arguments.quick or arguments.simulated)


def host_bytes(arguments: argparse.Namespace) -> int:
    given = arguments.host_gib
    return int(given * 2**30) if given else host_memory()[0] - RESERVE_BYTES


def device_here(arguments: argparse.Namespace) -> torch.device:
    """Return the GPU; with ``--quick`` the CPU if there is none; with ``--simulated`` the simulated accelerator.

    Raises:
        SystemExit: there is no GPU, and the arguments ask for one.
    """
    device = find_device(simulated=arguments.simulated)
    if device.type == "cpu" and not arguments.quick:
        raise SystemExit("no GPU here: nothing to measure (--quick shows on the CPU that the script runs)")
    return device


def find_device(*, simulated: bool) -> torch.device:
    """Return the first accelerator, or the CPU if there is none.

    Args:
        simulated: register the accelerator of tests/simulated, which needs a C++ compiler, and return it.
    """
    if simulated:
        from tests.simulated.device import register

        register()
    return accelerator.own_device(0)


def place(device: torch.device) -> str:
    """Return a line for a report that names the device of its figures."""
    if device.type == "cpu":
        return "No GPU: on the CPU, at a size that shows that the script runs. Its figures mean nothing."
    ((name, total),) = accelerator.installed()[:1]
    free = accelerator.free_bytes(device)
    text = f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{text}, CUDA {torch.version.cuda}" if torch.version.cuda else text


def reset_peak(device: torch.device) -> None:
    """Begin to count the device's peak memory; :func:`partita.memory.accelerator.allocated_bytes` returns it."""
    if accelerator.has_streams(device):
        torch.get_device_module(device).reset_peak_memory_stats()


def measured_ms(work: Callable[[], object], device: torch.device, repeats: int = 3) -> list[float]:
    """Return the milliseconds of some repetitions on all streams, after one that is not measured."""
    times = []
    for _ in range(repeats + 1):
        accelerator.wait_for_all(device)
        begin = accelerator.timed_event(device)
        work()
        accelerator.wait_for_all(device)
        end = accelerator.timed_event(device)
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[1:]


def chosen(modes: list[str] | None, known: Iterator[str] | list[str]) -> list[str]:
    """Return the requested modes, in the order of ``known``.

    Raises:
        SystemExit: a mode does not exist.
    """
    names = list(known)
    unknown = [mode for mode in modes or [] if mode not in names]
    if unknown:
        raise SystemExit(f"no such mode: {', '.join(unknown)}; there are: {', '.join(names)}")
    return [name for name in names if not modes or name in modes]
