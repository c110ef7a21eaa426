"""One rank of a trial: ``python -m partita.prediction.tune.trial_rank TASK FILE``.

TASK is a :class:`~partita.prediction.tune.trial.TrialTask` as JSON. The measurement, or the error, is written to FILE
as JSON.
"""

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from partita.config.launchers import LaunchEnvironment, set_launch_environment
from partita.engine.engine import Engine
from partita.engine.start import initialize
from partita.layout.state_bytes import gradient_bytes_in_place
from partita.memory import accelerator
from partita.prediction.processes import run_rank
from partita.prediction.trace.run import loss_of
from partita.prediction.tune.target import give_values
from partita.prediction.tune.trial import TrialTask
from partita.table.residence import Tier

# Steps in which optimizers allocate their states, and the order of all-gathers is recorded.
WARM_UP = 2
# The maximal value of oom_score_adj: Linux ends this process first when memory runs out.
_MAX_OOM_SCORE = "1000"


def measure(task: TrialTask) -> dict[str, Any]:
    """Return the seconds of a step (the median of the task's), and the peak bytes on this rank's device."""
    if task.ranks > 1:
        place = LaunchEnvironment(task.rank, task.ranks, task.rank, task.ranks)
        set_launch_environment(place, "127.0.0.1", task.port)
    torch.set_num_threads(task.threads)
    source = task.target.source()
    give_values(source.model)
    # Models that partita builds return the loss of training; for others, the loss of predictions is used.
    loss_fn = (lambda output, _: loss_of(output)) if source.context is None else None
    with initialize(source.model, task.config, loss_fn=loss_fn) as engine:
        device, resolved = engine.mesh.device, engine.blueprint.resolved
        batch = source.batch(resolved.batch.micro, device)

        def step() -> None:
            engine.train_batch([batch] * resolved.batch.accumulate)
            accelerator.wait_for_all(device)

        for _ in range(WARM_UP):
            step()
        times = [_seconds(step) for _ in range(task.steps)]
        return {"step_s": statistics.median(times), "peak_bytes": _peak(engine, step)}


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _peak(engine: Engine, step: Callable[[], None]) -> int:
    """Return the peak bytes on the device, from its allocator.

    On CPU, one more step is profiled: the result is its peak, plus the ledger's peak in all tiers except disk.
    """
    report = engine.memory_report()
    if not accelerator.is_host(engine.mesh.device):
        return report.device_peak_bytes
    autograd_bytes = autograd_peak_bytes(engine, step)
    held = sum(num for (_, tier), num in engine.memory_report().peak.items() if Tier(tier) is not Tier.DISK)
    return held + autograd_bytes


def autograd_peak_bytes(engine: Engine, step: Callable[[], object]) -> int:
    """Return the peak bytes from PyTorch's CPU allocator in a step, without memory that is in the ledger.

    This is the memory of autograd and of operators, except gradients that stay in ``param.grad``.
    """
    with profile(profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    most: int = max(accumulate((num_bytes for _, num_bytes in changes), initial=0))
    return most - gradient_bytes_in_place(engine.units, engine.mesh.rank)


def main(text: str, file: Path) -> int:
    """Measure, write the result or the error to ``file``, and return the exit code."""
    return run_rank(lambda: measure(TrialTask.of(text)), file)


def _end_with_parent() -> None:
    """End this process when the parent process has ended, which closes the pipe."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _end_first_without_memory() -> None:
    """Make Linux end this process, and not its parent, when memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text(_MAX_OOM_SCORE)
    except OSError:  # another system
        return


if __name__ == "__main__":
    _end_with_parent()
    _end_first_without_memory()
    code = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)
