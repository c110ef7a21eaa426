"""Adam on the CPU: times of partita's update kernels, torch's and DeepSpeed's, compared with the bandwidth of the
memory.

    python -m benchmarks.cpu_optimizer            # 100M parameters, 1 and 2 threads; about 6 GB
    python -m benchmarks.cpu_optimizer --quick    # does it run?
    python -m benchmarks.cpu_optimizer --save     # into benchmarks/results/cpu_optimizer.md

The floor of a mode is the bytes that its in-place update must move, divided by the bandwidth of torch's in-place
additions (two arrays read, one of them written) in the same run. The parameters are updated in slices of four million,
one after the other, so that no slice is in a cache when it is updated again. Modes take turns, and a mode's time is the
sum of each slice's shortest time, because other processes disturb only some repetitions of a slice. It ends with status
1 if a target is missed.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._common import RESULTS, ROOT, Report
from partita.kernels.quantize import encode
from partita.kernels.state import AdamRule, Moments, Weights
from partita.kernels.update import adam_
from partita.memory.allocate import allocate
from partita.memory.capacity import usable_cores

CPU = torch.device("cpu")
SLICE = 1 << 22
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RULE = AdamRule(lr=1e-4, step=10, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
FACTOR = 0.7
LOOP, CLASSIC = "in-place additions", "torch fused, fp32"


Run = Callable[[int], object]


@dataclass(frozen=True)
class Mode:
    """A way to update parameters.

    Attributes:
        bytes: the bytes per parameter that an update in place must read and write.
        runs: for each slice, a function that updates it with the given number of threads.
        target: the maximum time in units of the floor.
    """

    bytes: int
    runs: Sequence[Run]
    target: float | None = None


def main() -> int:
    made = argparse.ArgumentParser(description="Adam on the CPU")
    made.add_argument("--quick", action="store_true", help="two slices: does it run?")
    made.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    made.add_argument("--reps", type=int, default=20, help="repetitions, of which each slice's shortest counts")
    made.add_argument("--slices", type=int, default=24, help=f"slices of {SLICE} parameters")
    options = made.parse_args()
    num, reps = (2, 1) if options.quick else (options.slices, options.reps)
    report = Report("CPU optimizer")
    report.begin()
    report.write(f"{num * SLICE / 1e6:.0f}M parameters in {num} slices, each slice's shortest of {reps} repetitions;")
    report.write("ns a parameter (times the floor). *bytes*: what an update in place must read and write a parameter.")
    report.write("partita's rows take the gradient times a factor and check that it is finite, in the same pass.")
    report.write()
    modes = {**ours(num), **theirs(num), **deepspeed(num)}
    threads = [count for count in (1, 2) if count <= usable_cores()]
    times = measure(modes, threads, reps)
    write_table(report, modes, times, threads)
    if not options.quick:
        check(report, modes, times, threads)
    return report.end(options.save)


def measure(modes: dict[str, Mode], threads: list[int], reps: int) -> dict[tuple[str, int], float]:
    """Return the time, in ns per parameter, of each mode with each number of threads."""
    before = torch.get_num_threads()
    shortest: dict[tuple[str, int], list[float]] = {}
    for _ in range(reps):
        for count in threads:
            torch.set_num_threads(count)
            for name, mode in modes.items():
                best = shortest.setdefault((name, count), [math.inf] * len(mode.runs))
                for place, run in enumerate(mode.runs):
                    start = time.perf_counter()
                    run(count)
                    best[place] = min(best[place], time.perf_counter() - start)
    torch.set_num_threads(before)
    return {key: sum(best) / len(best) / SLICE * 1e9 for key, best in shortest.items()}


def write_table(
    report: Report, modes: dict[str, Mode], times: dict[tuple[str, int], float], threads: list[int]
) -> None:
    rates = [modes[LOOP].bytes / times[LOOP, count] for count in threads]
    measured = ", ".join(f"{rate:.1f} GB/s ({count})" for count, rate in zip(threads, rates, strict=True))
    report.write(f"Bandwidth of in-place additions (threads): {measured}.")
    report.write()
    rows = []
    for name, mode in modes.items():
        cells = [f"{times[name, c]:.3f} ({over_floor(modes, times, name, c):.2f})" for c in threads]
        rows.append([name, str(mode.bytes), *cells, f"<= {mode.target:.2f}" if mode.target else ""])
    counts = [f"{count} threads" if count > 1 else "1 thread" for count in threads]
    report.table(["mode", "bytes", *counts, "target"], rows)


def over_floor(modes: dict[str, Mode], times: dict[tuple[str, int], float], name: str, threads: int) -> float:
    return times[name, threads] / times[LOOP, threads] * modes[LOOP].bytes / modes[name].bytes


def check(report: Report, modes: dict[str, Mode], times: dict[tuple[str, int], float], threads: list[int]) -> None:
    for name, mode in modes.items():
        for count in threads:
            ratio = over_floor(modes, times, name, count)
            if mode.target:
                report.expect(ratio <= mode.target, f"{name}, {count} threads: {ratio:.2f} x the floor")
            if "8-bit moments" in name:
                beside = times[name, count] / times[CLASSIC, count]
                report.expect(beside <= 1, f"{name}, {count} threads: {beside:.2f} x {CLASSIC}")


def filled(num: int, dtype: torch.dtype, spread: float = 1.0) -> list[Tensor]:
    """Return slices of the same random values, each in its own memory."""
    some = (torch.randn(SLICE) * spread).to(dtype)
    return [allocate(SLICE, dtype, CPU).copy_(some) for _ in range(num)]


def ours(num: int) -> dict[str, Mode]:
    """Return the modes of partita's kernels, and the additions that measure the bandwidth."""
    masters, grads, half_grads = filled(num, torch.float32), filled(num, torch.float32), filled(num, torch.bfloat16)
    params, lows = filled(num, torch.bfloat16), filled(num, torch.int16, 1e4)
    classic = [
        Moments(first, second.abs_())
        for first, second in zip(filled(num, torch.float32), filled(num, torch.float32), strict=True)
    ]
    coded = coded_moments(num)
    added = filled(num, torch.float32)

    def adam(weights: Sequence[Weights], moments: Sequence[Moments], gradients: Sequence[Tensor]) -> list[Run]:
        every = zip(weights, moments, gradients, strict=True)
        return [partial(adam_, w, m, g, RULE, FACTOR) for w, m, g in every]

    plain = [Weights(master=master) for master in masters]
    whole = [Weights(param=param, master=master) for param, master in zip(params, masters, strict=True)]
    halves = [Weights(param=param, low=low) for param, low in zip(params, lows, strict=True)]
    return {
        LOOP: Mode(
            12, [lambda _, one=one, other=other: one.add_(other) for one, other in zip(added, grads, strict=True)]
        ),
        "partita, fp32": Mode(28, adam(plain, classic, grads)),
        "partita, fp32 master, bf16 parameter and gradient": Mode(28, adam(whole, classic, half_grads), 1.10),
        "partita, split master, bf16 gradient": Mode(26, adam(halves, classic, half_grads), 1.20),
        "partita, fp32 master, bf16, 8-bit moments": Mode(16, adam(whole, coded, half_grads)),
        "partita, split master, 8-bit moments": Mode(14, adam(halves, coded, half_grads)),
    }


def coded_moments(num: int) -> list[Moments]:
    some = encode(torch.randn(SLICE), torch.randn(SLICE).abs_(), step=1)
    return [Moments(*(allocate(t.numel(), t.dtype, CPU).copy_(t) for t in some)) for _ in range(num)]


def parameters(num: int) -> list[torch.nn.Parameter]:
    """Return fp32 parameters with gradients."""
    made = [torch.nn.Parameter(values) for values in filled(num, torch.float32)]
    for p, grad in zip(made, filled(num, torch.float32), strict=True):
        p.grad = grad
    return made


def stepping(optimizers: Sequence[torch.optim.Optimizer]) -> list[Run]:
    return [lambda _, optimizer=optimizer: optimizer.step() for optimizer in optimizers]


def with_casts(optimizers: Sequence[torch.optim.Optimizer], params: Sequence[torch.nn.Parameter]) -> list[Run]:
    """Return the updates of fp32 masters with bf16 gradients and bf16 parameters."""
    halves, half_grads = filled(len(params), torch.bfloat16), filled(len(params), torch.bfloat16)

    def run(place: int, _: int) -> None:
        p = params[place]
        assert p.grad is not None
        p.grad.copy_(half_grads[place])
        optimizers[place].step()
        halves[place].copy_(p.detach())

    return [partial(run, place) for place in range(len(params))]


def theirs(num: int) -> dict[str, Mode]:
    """Return the modes of torch's optimizers."""
    params = parameters(num)
    fused = [torch.optim.AdamW([p], **HYPER, fused=True) for p in params]
    foreach = [torch.optim.AdamW([p], **HYPER, foreach=True) for p in params]
    return {
        CLASSIC: Mode(28, stepping(fused)),
        "torch fused, fp32 master, with casts from and to bf16": Mode(28, with_casts(fused, params)),
        "torch foreach, fp32": Mode(28, stepping(foreach)),
    }


def deepspeed(num: int) -> dict[str, Mode]:
    """Return the modes of DeepSpeed's optimizer, if it is installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    params = parameters(num)
    optimizers = [DeepSpeedCPUAdam([p], **HYPER, adamw_mode=True) for p in params]
    return {
        "DeepSpeedCPUAdam, fp32": Mode(28, stepping(optimizers)),
        "DeepSpeedCPUAdam, fp32 master, with casts from and to bf16": Mode(28, with_casts(optimizers, params)),
    }


if __name__ == "__main__":
    sys.exit(main())
