"""One attempt, in a process of its own: python -m benchmarks.gpu._attempt JOB RESULT

RESULT gets a line for each number of tokens, and one that says what stopped the attempt (nothing, if it ended).
"""

import importlib.util
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from benchmarks.gpu._common import Job, model_flops, num_params
from benchmarks.gpu._modes import LONG_MODES, MODES, Setting, TakeStep
from partita.errors import PartitaError

# What an error says of what was missing.
SIGNS = {
    "offload to disk": "disk",
    "cannot pin": "host",
    "CUDA out of memory": "device",
    "out of memory": "device",
}


def batch(tokens: int, length: int, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``[tokens / length, length]``, small ones more frequent: there is something to learn."""
    generator = torch.Generator(device).manual_seed(step)
    rows = torch.rand(max(1, tokens // length), length + 1, generator=generator, device=device).square()
    ids = (rows * 255).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def measure(job: Job, take_step: TakeStep, tokens: int, device: torch.device) -> dict[str, Any]:
    """The best step, and the losses of all. A step is over when the next could begin; an update that goes on is in the
    time of the next, so the warm-up must be at least one step.
    """
    times, losses = [], []
    length = min(job.length, tokens)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(job.warmup + job.steps):
        rows = batch(tokens, length, device, step)
        begin = time.perf_counter()
        losses.append(take_step(*rows))
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    best = min(times[job.warmup :])
    return {
        "tokens": tokens,
        "times_s": times,
        "losses": losses,
        "params": num_params(job.shape),
        "tflops": model_flops(job.shape, tokens, length) / best / 1e12,
        "device_peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(job: Job, out: TextIO) -> str:
    """What stopped it."""
    mode = (MODES | LONG_MODES)[job.mode]
    if mode.needs and importlib.util.find_spec(mode.needs) is None:
        print(f"{mode.needs} is not installed")
        return "absent"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        take_step = mode.start(Setting(job.shape, device, job.path))
        for tokens in job.tokens:
            measured = measure(job, take_step, tokens, device)
            out.write(json.dumps(measured) + "\n")
            out.flush()
            if not all(loss == loss and abs(loss) < 1e4 for loss in measured["losses"]):
                print(f"losses that are none: {measured['losses']}")
                return "error"
    except (RuntimeError, MemoryError, PartitaError) as error:
        traceback.print_exc()
        if isinstance(error, MemoryError):
            return "host"
        return next((where for sign, where in SIGNS.items() if sign in str(error)), "error")
    return ""


def main() -> None:
    job, result = Job.from_json(sys.argv[1]), Path(sys.argv[2])
    with result.open("w") as out:
        out.write(json.dumps({"stopped": run(job, out)}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
