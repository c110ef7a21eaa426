"""Check the offload paths on one GPU, in one call: python -m benchmarks.gpu.offload_check --save

1. updates in plain torch on the device against the compiled kernels on the host, and float64;
2. host memory is pinned, and its copies overlap with the device's work;
3. every tier of parameters, optimizer and gradients at stages 1 to 3, with default and lean states: losses against
   float64 on the CPU, and bitwise where the arithmetic runs on the same device;
4. storages that are freed and restored by swapping their memory, and by resizing them.

`--quick` runs a part of the checks, on the CPU if there is no GPU.
"""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import partita
from benchmarks._common import Report
from benchmarks.gpu._attempt import batch
from benchmarks.gpu._common import device_here, is_tiny, measured_ms, parser, place
from partita.kernels import native, reference
from partita.kernels.quantize import split
from partita.kernels.state import AdamRule, Moments, Weights, num_blocks
from partita.kernels.update import adam_
from partita.memory import accelerator, buffer_pool
from partita.memory.allocate import allocate_host
from partita.train.decoder import Decoder, DecoderShape

SHAPE = DecoderShape(layers=3, width=64, heads=2, kv_heads=1, ffn_width=128)
STEPS, TOKENS, LENGTH = 6, 256, 64
RATE = 1e-3
# Maximum relative error of a loss compared with float64's.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
TIERS = ("none", "host", "disk")
PRECISIONS: dict[str, dict[str, str]] = {
    "fp32": {"compute": "fp32"},
    "bf16": {"compute": "bf16", "gradients": "bf16"},
    "bf16, split": {"compute": "bf16", "gradients": "bf16", "master": "split"},
    "bf16, int8": {"compute": "bf16", "gradients": "bf16", "moments": "int8"},
    "bf16, split + int8": {"compute": "bf16", "gradients": "bf16", "master": "split", "moments": "int8"},
    "bf16, in backward": {"compute": "bf16", "gradients": "in_backward"},
    "bf16, all of them": {"compute": "bf16", "gradients": "in_backward", "master": "split", "moments": "int8"},
}
FORMS = ("fp32", "bf16 + fp32", "split")


# ------------------------------------------------------------------------------------------------------- the kernels


def states(form: str, int8: bool, num: int, seed: int) -> tuple[Weights, Moments, Tensor]:
    """Return random weights in the given form, their moments before the first update, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    master, grad = (torch.randn(num, generator=generator) for _ in range(2))
    weights = Weights(master=master)
    if form != "fp32":
        param, low = split(master)
        weights = Weights(param=param, low=low) if form == "split" else Weights(param=param, master=master)
        grad = grad.bfloat16()
    if not int8:
        return weights, Moments(torch.zeros(num), torch.zeros(num)), grad
    scales = [torch.zeros(num_blocks(num)) for _ in range(2)]
    return weights, Moments(torch.zeros(num, dtype=torch.int8), torch.zeros(num, dtype=torch.uint8), *scales), grad


def moved(state: Weights | Moments, device: torch.device) -> Any:
    """Return a copy of a state on a device."""
    return type(state)(
        **{key: None if value is None else value.to(device, copy=True) for key, value in vars(state).items()}
    )


def tensors(*groups: Weights | Moments) -> list[Tensor]:
    return [value.cpu() for group in groups for value in vars(group).values() if value is not None]


def check_kernels(report: Report, device: torch.device, num: int) -> None:
    """Compare three updates by the reference in plain torch on the device with those by the kernels on the host."""
    report.write(f"Kernels on the host: {', '.join(native.levels()) or 'NONE'} (`make kernels` builds them).")
    report.write()
    report.expect(bool(native.levels()), "the compiled kernels are here")
    rows = []
    for form, int8 in product(FORMS, (False, True)):
        weights, moments, grad = states(form, int8, num, seed=torch.randint(2**31, ()).item())  # type: ignore[arg-type]
        there, at_rest = moved(weights, device), moved(moments, device)
        exact = (weights.master if weights.master is not None else reference._master(weights, slice(None))).double()
        m = v = torch.zeros(num, dtype=torch.float64)
        for step in range(1, 4):
            rule, factor = AdamRule(lr=RATE, step=step, weight_decay=0.1), 0.5
            adam_(weights, moments, grad, rule, factor, threads=torch.get_num_threads())
            reference.adam_(there, at_rest, grad.to(device), rule, factor)
            g = grad.double() * factor
            m, v = m * rule.beta1 + g * (1 - rule.beta1), v * rule.beta2 + g.square() * (1 - rule.beta2)
            exact = exact * rule.keep - rule.step_size * m / (v.sqrt() * rule.inv_sqrt_bias2 + rule.eps)
        same = all(map(torch.equal, tensors(weights, moments), tensors(there, at_rest)))
        mine = reference._master(there, slice(None)).cpu().double()
        error = float((mine - exact).norm() / exact.norm())
        rows.append([f"{form}{', int8' if int8 else ''}", "yes" if same else "NO", f"{error:.1e}"])
        report.expect(same, f"the update of {form}, int8 {int8}, has the same bits on the device and on the host")
        report.expect(error < (1e-3 if int8 else 1e-6), f"the update of {form}, int8 {int8}, is Adam's: {error:.1e}")
    report.table(["weights", "same bits", "from float64"], rows)


# --------------------------------------------------------------------------------------------------------- the copies


def check_copies(report: Report, device: torch.device, *, tiny: bool) -> None:
    """Check that host memory is pinned, measure its bandwidth, and check that copies overlap with matrix products.

    Args:
        tiny: use a size at which nothing can overlap, and do not check the overlap.
    """
    if not accelerator.has_streams(device):
        report.write("Pinned memory and copies: not without a GPU.")
        report.write()
        return
    num_bytes, width = (2**16, 64) if tiny else (2**30, 8192)
    host = allocate_host(num_bytes, torch.uint8, device)
    report.expect(host.is_pinned(), "allocate_host's memory is pinned")
    host.random_(0, 255)
    there, back = torch.empty_like(host, device=device), allocate_host(num_bytes, torch.uint8, device)
    square = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    side = torch.Stream(device)

    def compute() -> None:
        for _ in range(12):
            square @ square

    def copy(target: Tensor, source: Tensor) -> None:
        with side:
            target.copy_(source, non_blocking=True)

    alone = timed(compute, device)
    rows = []
    for name, target, source in (("to the device", there, host), ("to the host", back, there)):

        def both(target: Tensor = target, source: Tensor = source) -> None:
            copy(target, source)
            compute()

        only, together = (timed(work, device) for work in (partial(copy, target, source), both))
        hidden = (alone + only - together) / min(alone, only)
        rows.append([name, f"{num_bytes / only / 1e6:.1f}", f"{hidden:.0%}"])
        report.expect(tiny or hidden > 0.8, f"a copy {name} overlaps with a matrix product: {hidden:.0%}")
    report.expect(torch.equal(back, host), "copies return equal values")
    report.table(["copy", "GB/s", "hidden under matrix products"], rows)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of the fastest of three repetitions."""
    return min(measured_ms(work, device))


# ---------------------------------------------------------------------------------------------------------- the tiers


def losses_of(model: torch.nn.Module, device: torch.device, update: Callable[[Tensor], object]) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens, targets = (rows.to(device) for rows in batch(TOKENS, LENGTH, torch.device("cpu"), step))
        loss = model(tokens, targets)
        update(loss)
        losses.append(loss.item())
    return losses


def build() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPE)


def exact_losses() -> list[float]:
    """Return the losses of plain PyTorch in float64 on the CPU."""
    model = build().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)

    def update(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return losses_of(model, torch.device("cpu"), update)


def train(device: torch.device, stage: int, offload: dict[str, str], precision: dict[str, str]) -> list[float]:
    config = {"zero": {"stage": stage, "offload": offload}, "precision": precision, "optimizer": {"lr": RATE}}
    with partita.initialize(build(), config) as engine:

        def update(loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        return losses_of(engine.module, device, update)


def arithmetic(offload: dict[str, str], precision: dict[str, str], device: torch.device) -> tuple[object, ...]:
    """Return a key that is equal for runs that must have bitwise equal losses.

    It has the precision, the device of the update, and the kernel. The form of a master does not matter.
    """
    on_host = offload["optimizer"] != "none" or device.type == "cpu"
    ours = precision["compute"] == "bf16" and (on_host or precision.get("master") == "split")
    kept = precision.get("gradients", "fp32") == "bf16"
    return precision["compute"], kept, precision.get("moments"), on_host, ours or "moments" in precision


def check_tiers(report: Report, device: torch.device, quick: bool) -> None:
    exact = exact_losses()
    offloads = [
        {"parameters": parameters, "optimizer": optimizer, "gradients": gradients}
        for parameters, optimizer, gradients in product(TIERS, TIERS, ("auto", "none"))
        if gradients == "auto" or optimizer != "none"
    ]
    stages, chosen = (1, 2, 3), offloads
    if quick:
        stages, chosen = (3,), [offload for offload in offloads if offload["gradients"] == "auto"][::4]
    first: dict[tuple[object, ...], list[float]] = {}
    rows = []
    for name, precision in PRECISIONS.items():
        worst, differ, runs = 0.0, list[str](), 0
        for stage, offload in product(stages, chosen):
            if precision.get("gradients") == "in_backward" and offload["gradients"] != "auto":
                continue
            losses = train(device, stage, offload, precision)
            far = max(abs(mine - theirs) / theirs for mine, theirs in zip(losses, exact, strict=True))
            where = f"stage {stage}, {', '.join(f'{key} {tier}' for key, tier in offload.items())}"
            report.expect(far < TOLERANCE[precision["compute"]], f"{name}, {where}: {far:.1e} from float64")
            worst, runs = max(worst, far), runs + 1
            if losses != first.setdefault(arithmetic(offload, precision, device), losses):
                differ.append(where)
                report.expect(False, f"{name}, {where}: not bitwise equal to runs with the same arithmetic")
        rows.append([name, str(runs), f"{worst:.1e}", str(len(differ))])
    report.table(["precision", "stages x tiers", "farthest from float64", "with other bits"], rows)


def check_storages(report: Report, device: torch.device) -> None:
    """Check both ways to free and restore storages: swapping (if this torch supports it) and resizing."""
    expected, offload = None, {"parameters": "host", "optimizer": "host"}
    for swap in (True, False):
        patched = (
            nullcontext() if swap else mock.patch.object(buffer_pool, "storage_swap_available", return_value=False)
        )
        with patched:
            losses = train(device, 3, offload, PRECISIONS["fp32"])
        expected = expected or losses
        report.expect(losses == expected, f"losses are the same with storages {'swapped' if swap else 'resized'}")
    has = "swaps the memory of storages" if buffer_pool.storage_swap_available() else "can only resize storages"
    report.write(f"Storages: this torch {has}; the losses with resized ones were compared.")
    report.write()


def main() -> int:
    arguments = parser(__doc__).parse_args()
    device, tiny = device_here(arguments), is_tiny(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    report = Report("Offload on the GPU: right, and bit for bit")
    report.begin()
    report.write(place(device))
    report.write()
    check_kernels(report, device, 10_007 if tiny else 20_000_003)
    check_copies(report, device, tiny=arguments.simulated)
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels' backward sums in a different order at each run
        check_tiers(report, device, tiny)
        check_storages(report, device)
    return report.end(arguments.save)


if __name__ == "__main__":
    sys.exit(main())
