"""User-defined compression strategies, each in one file outside of the library."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import partita
from partita.layout.traffic import StepShape, step_traffic
from tests.compression.own_sync import OwnExtension
from tests.compression.test_feedback import telescopes
from tests.kit.models import Stack, square_loss
from tests.kit.plans import ZERO
from tests.kit.ranks import on_ranks
from tests.kit.training import rank, whole_weights, world

HALVES = "tests.compression.own_codec:Halves"


def trained(zero: dict[str, Any]) -> tuple[dict[str, Tensor], int, int]:
    """Train three steps; return the weights, and the measured and planned bytes of gradients in the last step."""
    torch.manual_seed(0)
    with partita.initialize(Stack(2), {"zero": zero, "clip_grad_norm": 0.5}) as engine:
        for step in range(3):
            before = engine.traffic_report()
            engine.backward(square_loss(engine, rank(), step))
            engine.step()
        sent = engine.traffic_report().since(before).sent_bytes("gradients")
        planned = step_traffic(engine.units, StepShape()).sent_bytes("gradients")
        return whole_weights(engine), sent, planned


def sums_its_own_way(zero: dict[str, Any]) -> None:
    expected, *_ = trained(zero)
    with mock.patch("partita.config.resolve.installed", OwnExtension):
        weights, sent, planned = trained(zero)
    assert sent == planned > 0
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("plan", ["0", "1", "2", "3"])
def test_a_way_to_sum_is_one_file_and_a_row(plan: str) -> None:
    """A custom sum has bitwise the weights of the reduce-scatter, which also sums in rank order."""
    on_ranks(2, sums_its_own_way, ZERO[plan])


@pytest.mark.parametrize(("plan", "ranks"), [("0", 2), ("2", 4), ("3", 2)])
def test_a_codec_is_one_file(plan: str, ranks: int) -> None:
    """The quantization error of a custom codec is sent later, by error feedback."""
    on_ranks(ranks, telescopes_a_little, ZERO[plan])


def telescopes_a_little(zero: dict[str, Any]) -> None:
    with mock.patch("tests.compression.test_feedback.LEAST_HELD", 1e-4):
        telescopes(zero, HALVES, world(), 1, "fp32")


def refused(place: str) -> str:
    with pytest.raises((partita.ConfigError, partita.PartitaError)) as raised:
        with partita.initialize(Stack(1), {"zero": {"stage": 2}, "communication": {"gradients": place}}) as engine:
            engine.backward(square_loss(engine, rank(), 0))
            engine.step()
    return str(raised.value)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("tests.compression.nowhere:Halves", "No module named 'tests.compression.nowhere'"),
        ("tests.compression.own_codec:Nobody", "has no attribute 'Nobody'"),
        ("tests.compression.own_codec:NOT_A_CODEC", "is not a subclass of partita.kernels.codecs.TorchCodec"),
        ("tests.compression.own_codec:Wrong", "Wrong.encode returned torch.bfloat16 of shape"),
        ("halves", "communication.gradients"),
    ],
)
def test_what_is_no_codec_is_refused(place: str, said: str) -> None:
    for each in on_ranks(2, refused, place):
        assert said in each
