"""Counted FLOPs against their formula, peak FLOPs by device name, and utilization."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from partita.observe.utilization import PEAK_TFLOPS, Utilization, peak_flops, peak_flops_by_name, training_flops
from partita.train.decoder import Decoder, DecoderShape


def test_a_linear_layer_takes_six_operations_per_weight_and_row() -> None:
    model, rows = nn.Linear(32, 16), torch.randn(5, 32)
    assert training_flops(model, lambda: model(rows)) == 6 * 5 * 32 * 16


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    model, rows = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), torch.randn(4, 8)
    model[0].requires_grad_(False)
    forward = 2 * 4 * 2 * 8 * 8
    assert training_flops(model, lambda: model(rows)) == forward * (2 + 0.5)


def test_what_is_recomputed_counts_once() -> None:
    model, rows = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    plain = training_flops(model, lambda: model(rows))
    assert training_flops(model, lambda: checkpoint(model, rows, use_reentrant=False)) == plain


def test_a_decoder_takes_six_per_parameter_and_token_and_the_attention() -> None:
    shape = DecoderShape(layers=2, width=64, heads=4, kv_heads=4, ffn_width=128, vocab=256, tied=False)
    model, batch, length = Decoder(shape), 2, 32
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    counted = training_flops(model, lambda: model(tokens, targets=tokens))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    attention = 12 * shape.layers * shape.width * length * batch * length
    assert counted == 6 * matrices * batch * length + attention


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_peak_is_that_of_the_device_named_or_none(name: str, tflops: float | None) -> None:
    assert peak_flops_by_name(name) == (tflops and tflops * 1e12)


def test_every_peak_is_found_by_its_own_name() -> None:
    for name, tflops in PEAK_TFLOPS.items():
        assert peak_flops_by_name(f"Maker {name}") == tflops * 1e12


def test_the_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_other_than_16_bit_products_have_no_known_peak() -> None:
    assert peak_flops(torch.device("cuda"), torch.float32) is None


def test_the_share_of_the_peak() -> None:
    assert Utilization(step_flops=2e12, peak_flops_per_s=1e13).of(0.5) == pytest.approx(0.4)
