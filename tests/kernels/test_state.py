"""Checks of the kernels' arguments, and the fallback without compiled kernels."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from partita.errors import PartitaError
from partita.kernels import native
from partita.kernels.state import AdamRule, Moments, Weights, num_blocks
from partita.kernels.update import adam_, lion_
from partita.table.span import QUANTUM
from tests.kernels.states import ADAM, make, random_grad

F, B, H, S, U = (torch.empty(300, dtype=d) for d in (torch.float, torch.bfloat16, torch.half, torch.int16, torch.uint8))
C, X = torch.empty(300, dtype=torch.int8), torch.empty(2)
META = torch.empty(300, device="meta")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "got nothing"),
        ({"param": B}, "got param"),
        ({"low": S}, "got low"),
        ({"master": F, "low": S}, "got master and low"),
        ({"param": B, "master": F, "low": S}, "got param and master and low"),
        ({"param": H, "low": S}, "param must be bfloat16, got float16"),
        ({"param": F, "master": F}, "param must be bfloat16 or float16, got float32"),
        ({"param": B, "low": C}, "low must be int16, got int8"),
        ({"master": B}, "master must be float32, got bfloat16"),
        ({"param": B[:299], "master": F}, "param must have 300 elements, got 299"),
        ({"master": torch.empty(600)[::2]}, r"master must be contiguous, got strides \(2,\)"),
        ({"param": B, "master": META}, "param must be on meta, like the other tensors, got cpu"),
    ],
)
def test_weights_come_in_three_forms(tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(PartitaError, match=message):
        Weights(**tensors)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((F, F, X, None), "got the scale of one"),
        ((F, U, X, X), "exp_avg must be int8, got float32"),
        ((C, F, X, X), "exp_avg_sq must be uint8, got float32"),
        ((C, U), "exp_avg must be float32, got int8"),
        ((F, F[:10]), "exp_avg_sq must have 300 elements, got 10"),
        ((C, U, X, torch.empty(1)), "exp_avg_sq_scale must have 2 elements, got 1"),
    ],
)
def test_moments_come_in_two_forms(tensors: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(PartitaError, match=message):
        Moments(*tensors)


def test_what_is_used_together_is_equally_long() -> None:
    weights, moments = Weights(master=F), Moments(F, F)
    with pytest.raises(PartitaError, match="grad must have 300 elements, got 10"):
        adam_(weights, moments, F[:10], ADAM)
    with pytest.raises(PartitaError, match="exp_avg must have 300 elements, got 10"):
        adam_(weights, Moments(F[:10], F[:10]), F, ADAM)
    with pytest.raises(PartitaError, match="exp_avg must be float32, got bfloat16"):
        lion_(weights, B, F, ADAM)  # type: ignore[arg-type]


def test_steps_count_from_one() -> None:
    with pytest.raises(PartitaError, match="steps count from 1, got 0"):
        AdamRule(lr=1e-3, step=0)


@pytest.mark.usefixtures("compiled")
def test_blocks_are_the_layouts() -> None:
    module = native.module()
    assert module is not None
    assert module.BLOCK == QUANTUM
    assert [num_blocks(num) for num in (0, 1, 256, 257)] == [0, 1, 1, 2]
    assert native.levels()[0] == "baseline"


def test_without_the_kernels_there_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    native.module.cache_clear()
    try:
        state, grad = make(300, "fp32"), random_grad(300, torch.float32)
        with pytest.warns(UserWarning, match="without its compiled kernels.*No module named"):
            adam_(state.weights, state.moments, grad, ADAM)
        adam_(state.weights, state.moments, grad, ADAM)  # a second warning would be an error
    finally:
        native.module.cache_clear()
