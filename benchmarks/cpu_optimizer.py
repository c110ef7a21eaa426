"""Adam on the CPU: how far from the memory's bandwidth are the update kernels, beside torch's and DeepSpeed's?

    python -m benchmarks.cpu_optimizer            # 100M parameters, 1 and 2 threads; about 6 GB
    python -m benchmarks.cpu_optimizer --quick    # does it run?
    python -m benchmarks.cpu_optimizer --save     # into benchmarks/results/cpu_optimizer.md

The floor of a mode is the bytes that its in-place update must move over the bandwidth of an in-place update loop (four
arrays read, three of them written, an addition and a product each), measured in the same run. Modes take turns, and the
shortest of all repetitions counts. It ends with status 1 where a target is missed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks._common import RESULTS, ROOT, Report
from partita.cli.machine import usable_cores
from partita.kernels import native
from partita.kernels.quantize import encode, split
from partita.kernels.state import AdamRule, Moments, Weights, num_blocks
from partita.kernels.sums import square_sum
from partita.kernels.update import adam_
from partita.memory.allocate import allocate

CPU = torch.device("cpu")
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RULE = AdamRule(lr=1e-4, step=10, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
FACTOR = 0.7
LOOP, CLASSIC = "in-place loop", "torch fused, fp32"


@dataclass(frozen=True)
class Mode:
    """A way to update; ``bytes`` a parameter are what it must read and write in place."""

    bytes: int
    run: Callable[[int], object]
    target: float | None = None


def main() -> int:
    made = argparse.ArgumentParser(description="Adam on the CPU")
    made.add_argument("--quick", action="store_true", help="a million parameters: does it run?")
    made.add_argument("--save", action="store_true", help=f"write the report into {RESULTS.relative_to(ROOT)}/")
    made.add_argument("--reps", type=int, default=15, help="repetitions, of which the shortest counts")
    made.add_argument("--millions", type=int, default=100, help="parameters")
    options = made.parse_args()
    num, reps = (1 << 20, 2) if options.quick else (options.millions * 1_000_000, options.reps)
    report = Report("CPU optimizer")
    report.begin()
    report.write(f"{num / 1e6:.0f}M parameters, the shortest of {reps} repetitions in turn; ns a parameter (times the")
    report.write("floor). *bytes*: what an in-place update must read and write a parameter. partita's rows take the")
    report.write("gradient times a factor and check that it is finite, in the same pass.")
    report.write()
    modes = {**ours(num), **theirs(num), **deepspeed(num)}
    threads = [count for count in (1, 2) if count <= usable_cores()]
    times = measure(modes, threads, reps)
    write_table(report, modes, times, threads, num)
    if not options.quick:
        check(report, modes, times, threads)
    return report.end(options.save)


def measure(modes: dict[str, Mode], threads: list[int], reps: int) -> dict[tuple[str, int], float]:
    """The shortest time, in s, of each mode with each number of threads."""
    before, times = torch.get_num_threads(), {}
    for _ in range(reps):
        for count in threads:
            torch.set_num_threads(count)
            for name, mode in modes.items():
                start = time.perf_counter()
                mode.run(count)
                elapsed = time.perf_counter() - start
                times[name, count] = min(times.get((name, count), elapsed), elapsed)
    torch.set_num_threads(before)
    return times


def write_table(
    report: Report, modes: dict[str, Mode], times: dict[tuple[str, int], float], threads: list[int], num: int
) -> None:
    rates = [modes[LOOP].bytes * num / times[LOOP, count] / 1e9 for count in threads]
    measured = ", ".join(f"{rate:.1f} GB/s ({count})" for count, rate in zip(threads, rates, strict=True))
    report.write(f"Bandwidth of the in-place loop (threads): {measured}.")
    report.write()
    rows = []
    for name, mode in modes.items():
        cells = [f"{times[name, c] / num * 1e9:.3f} ({over_floor(modes, times, name, c):.2f})" for c in threads]
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


def filled(num: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Random values in memory of their own."""
    out = allocate(num, dtype, CPU)
    for part in out.split(1 << 20):
        part.copy_(torch.randn(part.numel()) * spread)
    return out


def ours(num: int) -> dict[str, Mode]:
    """partita's kernels and the loop that measures the bandwidth."""
    master, exp_avg = filled(num, torch.float32), filled(num, torch.float32, 1e-3)
    exp_avg_sq = allocate(num, torch.float32, CPU).fill_(1e-4)
    grad, half_grad = filled(num, torch.float32, 0.01), filled(num, torch.bfloat16, 0.01)
    param, low = allocate(num, torch.bfloat16, CPU), allocate(num, torch.int16, CPU)
    in_place = [*(filled(num, torch.float32) for _ in range(3)), grad]
    classic, coded = Moments(exp_avg, exp_avg_sq), coded_moments(num)
    for at in range(0, num, 1 << 20):
        some = slice(at, at + (1 << 20))
        param[some], low[some] = split(master[some])

    def adam(weights: Weights, moments: Moments, g: Tensor) -> Callable[[int], object]:
        return lambda threads: adam_(weights, moments, g, RULE, FACTOR, threads)

    whole, halves = Weights(param=param, master=master), Weights(param=param, low=low)
    return {
        LOOP: Mode(28, lambda threads: native.in_place_loop(in_place, threads)),
        "partita, fp32": Mode(28, adam(Weights(master=master), classic, grad)),
        "partita, fp32 master, bf16 parameter and gradient": Mode(28, adam(whole, classic, half_grad), 1.10),
        "partita, split master, bf16 gradient": Mode(26, adam(halves, classic, half_grad), 1.20),
        "partita, fp32 master, bf16, 8-bit moments": Mode(16, adam(whole, coded, half_grad)),
        "partita, split master, 8-bit moments": Mode(14, adam(halves, coded, half_grad)),
        "partita, square sum of a bf16 gradient": Mode(2, lambda threads: square_sum(half_grad, threads)),
    }


def coded_moments(num: int) -> Moments:
    codes, codes_sq = allocate(num, torch.int8, CPU), allocate(num, torch.uint8, CPU)
    scale, scale_sq = (allocate(num_blocks(num), torch.float32, CPU) for _ in range(2))
    for at in range(0, num, 1 << 20):
        some, blocks = slice(at, min(at + (1 << 20), num)), slice(at // 256, num_blocks(min(at + (1 << 20), num)))
        size = some.stop - at
        first = encode(torch.randn(size) * 1e-3, torch.rand(size) * 1e-4, step=1)
        codes[some], codes_sq[some], scale[blocks], scale_sq[blocks] = first
    return Moments(codes, codes_sq, scale, scale_sq)


def parameter(num: int) -> torch.nn.Parameter:
    """An fp32 parameter with a gradient."""
    made = torch.nn.Parameter(filled(num, torch.float32))
    made.grad = filled(num, torch.float32, 0.01)
    return made


def with_casts(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> Callable[[int], object]:
    """The update of an fp32 master between a bf16 gradient and a bf16 parameter."""
    half, half_grad = allocate(p.numel(), torch.bfloat16, CPU), filled(p.numel(), torch.bfloat16, 0.01)

    def run(_: int) -> None:
        assert p.grad is not None
        p.grad.copy_(half_grad)
        optimizer.step()
        half.copy_(p.detach())

    return run


def theirs(num: int) -> dict[str, Mode]:
    """torch's own."""
    p = parameter(num)
    fused = torch.optim.AdamW([p], **HYPER, fused=True)
    q = parameter(num)
    foreach = torch.optim.AdamW([q], **HYPER, foreach=True)
    return {
        CLASSIC: Mode(28, lambda _: fused.step()),
        "torch fused, fp32 master, with casts from and to bf16": Mode(28, with_casts(fused, p)),
        "torch foreach, fp32": Mode(28, lambda _: foreach.step()),
    }


def deepspeed(num: int) -> dict[str, Mode]:
    """DeepSpeed's, where it is installed."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    p = parameter(num)
    optimizer = DeepSpeedCPUAdam([p], **HYPER, adamw_mode=True)
    return {
        "DeepSpeedCPUAdam, fp32": Mode(28, lambda _: optimizer.step()),
        "DeepSpeedCPUAdam, fp32 master, with casts from and to bf16": Mode(28, with_casts(optimizer, p)),
    }


if __name__ == "__main__":
    sys.exit(main())
