"""Run one attempt in its own process: python -m benchmarks.gpu._attempt JOB RESULT

A line for each number of tokens is written to RESULT, then one with the reason why the attempt stopped (empty if it
completed).
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

from benchmarks.gpu._common import Job, find_device, model_flops, num_params, reset_peak
from benchmarks.gpu._modes import LONG_MODES, MODES, Setting, TakeStep
from partita.errors import PartitaError
from partita.memory import accelerator

# Texts of errors, and the resource that was exhausted.
SIGNS = {
    "offload to disk": "disk",
    "cannot pin": "host",
    "out of memory": "device",
}


def batch(tokens: int, length: int, device: torch.device, step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets ``[tokens / length, length]``.

    Small tokens are more frequent than large ones, so that there is something to learn.
    """
    generator = torch.Generator().manual_seed(step)
    rows = torch.rand(max(1, tokens // length), length + 1, generator=generator).square()
    ids = (rows * 255).long().to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def measure(job: Job, take_step: TakeStep, tokens: int, device: torch.device) -> dict[str, Any]:
    """Return the best step, and the losses of all steps.

    A step ends when the next one can begin. An update that still runs then is counted in the next step, so the warm-up
    must be at least one step.
    """
    times, losses = [], []
    length = min(job.length, tokens)
    reset_peak(device)
    for step in range(job.warmup + job.steps):
        rows = batch(tokens, length, device, step)
        begin = time.perf_counter()
        losses.append(take_step(*rows))
        accelerator.wait_for_all(device)
        times.append(time.perf_counter() - begin)
    best = min(times[job.warmup :])
    return {
        "tokens": tokens,
        "times_s": times,
        "losses": losses,
        "params": num_params(job.shape),
        "tflops": model_flops(job.shape, tokens, length) / best / 1e12,
        "device_peak": accelerator.allocated_bytes(device)[1],
    }


def run(job: Job, out: TextIO) -> str:
    """Run the job; return the reason why it stopped."""
    mode = (MODES | LONG_MODES)[job.mode]
    if mode.needs and importlib.util.find_spec(mode.needs) is None:
        print(f"{mode.needs} is not installed")
        return "absent"
    if job.simulated and not mode.simulates:
        print("not on the simulated accelerator")
        return "absent"
    device = find_device(simulated=job.simulated)
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
