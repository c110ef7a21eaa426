"""The Triton kernels of updates on one GPU: python -m benchmarks.gpu.kernels --save

For each form of the states, three updates on the device must be bitwise equal to the reference on the CPU. The time of
AdamW is compared with the bytes that it must move (each state read once and written once) and with plain torch.

`--quick` compares only the bits, on the CPU if there is no GPU.
"""

import sys
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks._common import Report
from benchmarks.gpu._common import device_here, parser, place
from benchmarks.gpu.offload_check import FORMS, moved, states, tensors, timed
from partita.kernels import reference
from partita.kernels.state import AdamRule, Moments, Weights
from partita.kernels.update import adam_
from partita.memory import accelerator

RULE = AdamRule(lr=1e-3, step=3, weight_decay=0.1)
NUM = 1 << 28


def has_same_bits(form: str, int8: bool, num: int, device: torch.device) -> bool:
    """Return True if three updates on the device are bitwise equal to the reference on the CPU."""
    weights, moments, grad = states(form, int8, num, seed=num)
    there, at_rest = moved(weights, device), moved(moments, device)
    for step in range(1, 4):
        reference.adam_(weights, moments, grad, replace(RULE, step=step), 0.5)
        adam_(there, at_rest, grad.to(device), replace(RULE, step=step), 0.5)
    pairs = zip(tensors(weights, moments), tensors(there, at_rest), strict=True)
    return all(torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) for mine, theirs in pairs)


def bytes_moved(weights: Weights, moments: Moments, grad: Tensor) -> int:
    """Return the bytes of the gradient and of all states, read and written; a parameter with a master is not read."""
    only_written = weights.param.nbytes if weights.param is not None and weights.master is not None else 0
    held = [value for state in (weights, moments) for value in vars(state).values() if value is not None]
    return grad.nbytes + 2 * sum(value.nbytes for value in held) - only_written


def main() -> int:
    options = parser(__doc__).parse_args()
    device = device_here(options)
    report = Report("Updates by Triton kernels")
    report.begin()
    report.write(place(device))
    report.write()
    measures, num = accelerator.has_streams(device) and not options.quick, 1 << 10 if options.simulated else NUM
    if measures:
        copied = torch.empty(4 * num, device=device)
        rate = 2 * copied.nbytes / timed(partial(torch.empty_like(copied).copy_, copied), device) / 1e9
        del copied
        report.write(f"AdamW on {num / 1e6:.0f}M parameters; a copy moves {rate:.2f} TB/s.")
        report.write()
    rows = []
    for form, int8 in product(FORMS, (False, True)):
        same = all(has_same_bits(form, int8, num, device) for num in (1000, 1 << 16))
        report.expect(same, f"{form}, int8 {int8}: the bits of the reference")
        figures = ["-"] * 5
        if measures:
            weights, moments, grad = (each.to(device) if isinstance(each, Tensor) else moved(each, device)
                                      for each in states(form, int8, num, seed=0))  # fmt: skip
            num_bytes = bytes_moved(weights, moments, grad)
            ours, plain = (
                timed(partial(update, weights, moments, grad, RULE, 0.5), device) for update in (adam_, reference.adam_)
            )
            figures = [f"{num_bytes / num:.1f}", f"{ours:.2f}", f"{num_bytes / ours / 1e9:.2f}", f"{plain:.1f}",
                       f"{plain / ours:.0f}"]  # fmt: skip
        rows.append([f"{form}{', int8 moments' if int8 else ''}", "yes" if same else "NO", *figures])
    report.table(["weights", "same bits", "bytes a parameter", "ms", "TB/s", "plain torch, ms", "x"], rows)
    return report.end(options.save)


if __name__ == "__main__":
    sys.exit(main())
