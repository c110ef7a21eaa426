"""The Triton kernels of updates on one GPU: python -m benchmarks.gpu.kernels --save

Each form of the states: the bits of the reference on the CPU, and the time of AdamW with a bf16 gradient beside the
bytes that it must move (each state read once and written once) and beside plain torch. `--quick` runs the reference
against itself on the CPU where there is no GPU.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from unittest import mock

import torch
from torch import Tensor

from benchmarks._common import Report
from benchmarks.gpu._common import device_here, parser, place
from partita.kernels import native, reference, update
from partita.kernels.quantize import split
from partita.kernels.state import AdamRule, Moments, Weights, num_blocks
from partita.kernels.update import adam_

RULE = AdamRule(lr=1e-3, step=3, weight_decay=0.1)
FORMS = ("fp32", "fp32 and bf16", "split")
REPEATS = 7


def states(form: str, int8: bool, num: int, device: torch.device) -> tuple[Weights, Moments, Tensor]:
    """Random weights, moments of no update yet, and a bf16 gradient."""
    master, grad = (torch.randn(num, device=device) for _ in range(2))
    weights = Weights(master=master)
    if form != "fp32":
        param, low = split(master)
        weights = Weights(param=param, low=low) if form == "split" else Weights(param=param, master=master)
    dtypes = (torch.int8, torch.uint8) if int8 else (torch.float32, torch.float32)
    moments = [torch.zeros(num, dtype=dtype, device=device) for dtype in dtypes]
    scales = [torch.zeros(num_blocks(num), device=device) for _ in range(2 * int8)]
    return weights, Moments(*moments, *scales), grad.bfloat16()


def tensors(weights: Weights, moments: Moments) -> list[Tensor]:
    return [tensor for part in (weights, moments) for tensor in vars(part).values() if tensor is not None]


def bytes_moved(weights: Weights, moments: Moments, grad: Tensor) -> int:
    """What is written from another state, as a parameter from its master, is not read."""
    only_written = weights.param.nbytes if weights.param is not None and weights.master is not None else 0
    return grad.nbytes + 2 * sum(tensor.nbytes for tensor in tensors(weights, moments)) - only_written


def same_bits(form: str, int8: bool, num: int, device: torch.device) -> bool:
    """Three updates on the device and by the reference on the CPU."""
    weights, moments, grad = states(form, int8, num, torch.device("cpu"))
    there = [type(part)(**{k: None if v is None else v.to(device) for k, v in vars(part).items()})  # type: ignore[arg-type]
             for part in (weights, moments)]  # fmt: skip
    for step in range(1, 4):
        rule = replace(RULE, step=step)
        reference.adam_(weights, moments, grad, rule, 0.5)
        adam_(*there, grad.to(device), rule, 0.5)  # type: ignore[call-arg, arg-type]
    pairs = zip(tensors(weights, moments), tensors(*there), strict=True)  # type: ignore[arg-type]
    return all(torch.equal(mine.view(torch.uint8), theirs.cpu().view(torch.uint8)) for mine, theirs in pairs)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """The median, after one more."""
    if device.type == "cpu":
        work()
        return 1.0
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[1:])


def main() -> int:
    options = parser(__doc__).parse_args()
    device = device_here(options.quick)
    num = 1 << (16 if options.quick else 28)
    report = Report("Updates by Triton kernels")
    report.begin()
    report.write(place(device))
    report.write()
    copied = torch.empty(1 << (16 if options.quick else 30), device=device)
    target = torch.empty_like(copied)
    rate = 2 * copied.nbytes / milliseconds(lambda: target.copy_(copied), device) / 1e9
    report.write(f"AdamW on {num / 1e6:.0f}M parameters; a copy moves {rate:.2f} TB/s.")
    report.write()
    rows = []
    for form, int8 in product(FORMS, (False, True)):
        same = all(same_bits(form, int8, size, device) for size in (1000, 1 << 16))
        report.expect(same, f"{form}, int8 {int8}: the bits of the reference")
        weights, moments, grad = states(form, int8, num, device)
        ideal = bytes_moved(weights, moments, grad)
        ours = milliseconds(lambda w=weights, m=moments, g=grad: adam_(w, m, g, RULE, 0.5), device)  # type: ignore[misc]
        with (
            mock.patch.object(native, "module", return_value=None),
            mock.patch.object(update, "_elsewhere", return_value=reference),
        ):
            torchs = milliseconds(lambda w=weights, m=moments, g=grad: adam_(w, m, g, RULE, 0.5), device)  # type: ignore[misc]
        name = f"{form}{', int8 moments' if int8 else ''}"
        rows.append([name, "yes" if same else "NO", f"{ideal / num:.1f}", f"{ours:.2f}",
                     f"{ideal / ours / 1e9:.2f}", f"{torchs:.1f}", f"{torchs / ours:.0f}"])  # fmt: skip
    header = ["weights", "same bits", "bytes a parameter", "ms", "TB/s", "plain torch, ms", "x"]
    report.table(header, rows)
    return report.end(options.save)


if __name__ == "__main__":
    sys.exit(main())
