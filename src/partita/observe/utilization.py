"""Model FLOPs utilization (MFU): the FLOPs of training divided by the peak FLOPs of the device in the same time.

torch.utils.flop_counter counts the matrix products, convolutions and attention of one forward, so a model needs no
change and no formula. Attention counts as the full square, even if its mask is causal. Training takes three times as
many FLOPs, because backward has two products for each; with frozen weights the factor is 2 + the share of the
parameters that train. Recomputed activations count once, and kernels that PyTorch does not know are not counted. This
is the definition of Chowdhery et al., PaLM (2022), Appendix B.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from partita.memory import accelerator

# TFLOP/s of dense products with 16-bit inputs and fp32 sums, from the makers' data sheets (NVIDIA's figures "with
# sparsity" halved). The first key that occurs in the driver's device name is used. Where a library is named, its table
# has the device too, and cites the same sheets: torch._inductor.analysis.device_info, Lightning's
# lightning.fabric.utilities.throughput, torchao.testing.training.roofline_utils.
PEAK_TFLOPS = {
    "GB200": 2500.0,  # NVIDIA GB200 NVL72: 360 PFLOP/s with sparsity of 72; torchao has the B200's
    "B200": 2250.0,  # NVIDIA Blackwell architecture; torchao
    "GH200": 989.5,  # NVIDIA GH200
    "H200 NVL": 835.5,  # NVIDIA H200: 1671 with sparsity
    "H200": 989.5,  # NVIDIA H200: 1979 with sparsity
    "H100 NVL": 835.5,  # NVIDIA H100 NVL: 1671 with sparsity; Lightning has a pair's
    "H100 PCIe": 756.5,  # NVIDIA H100: 1513 with sparsity; Lightning
    "H100": 989.5,  # NVIDIA H100: 1979 with sparsity; torch, torchao, Lightning
    "A100": 312.0,  # NVIDIA A100; torch, Lightning
    "A30": 165.0,  # NVIDIA A30
    "L40S": 362.0,  # NVIDIA L40S
    "L4": 121.0,  # NVIDIA L4: 242 with sparsity; Lightning
    "MI325X": 1307.4,  # AMD Instinct MI325X
    "MI300X": 1307.4,  # AMD Instinct MI300X; torch, torchao
    "MI250X": 191.5,  # AMD Instinct MI250X: a device is one of its two dies
}

_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
)


@dataclass(frozen=True)
class Utilization:
    """FLOPs of a step on one rank, and the peak FLOP/s of its device."""

    step_flops: float
    peak_flops_per_s: float

    def of(self, step_s: float) -> float:
        """Return the fraction of the peak that a step of ``step_s`` seconds reaches."""
        return self.step_flops / (self.peak_flops_per_s * step_s)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of an accelerator for 16-bit products.

    It is None if the device's peak is unknown, for the CPU, and for a ``dtype`` of another size.
    """
    if accelerator.is_host(device) or dtype.itemsize != 2:
        return None
    return peak_flops_by_name(accelerator.name(device))


def peak_flops_by_name(name: str) -> float | None:
    """Return the peak FLOP/s by the name that the driver gives; None if it is unknown."""
    found = (tflops for known, tflops in PEAK_TFLOPS.items() if re.search(rf"\b{known}\b", name))
    return next((tflops * 1e12 for tflops in found), None)


def training_flops(model: nn.Module, forward: Callable[[], object]) -> float:
    """Return the FLOPs of forward and backward for ``forward``, a call of the model, which is made here once.

    With an engine, this is a collective.
    """
    parameters = list(model.parameters())
    num_all = sum(parameter.numel() for parameter in parameters)
    num_trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    mapping = dict.fromkeys(_ATTENTION, _attention_flops)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        forward()
    return int(counter.get_total_flops()) * (2 + num_trained / num_all)


def _attention_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *_: object, **__: object
) -> int:
    """Return the FLOPs of attention on shapes [batch, heads, length, size]. Keys and values may have fewer heads.

    torch.utils.flop_counter has no formula for the CPU's kernel, and refuses fewer heads before torch 2.13.
    """
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])
