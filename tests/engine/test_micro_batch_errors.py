"""Errors of micro-batches that forward does not accept; errors inside forward are raised unchanged."""

import pytest
import torch

import partita
from partita import PartitaError
from tests.kit.models import Stack


def test_micro_batches_that_forward_does_not_take_name_the_loop_to_write() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        pair = (torch.zeros(4, 16), torch.zeros(4, 16))
        for call in (engine.train_batch, engine.eval_batch):
            with pytest.raises(PartitaError, match=r"Stack\.forward does not take this micro-batch \(too many"):
                call([pair])
        with pytest.raises(PartitaError, match=r"engine\.backward\(loss_fn\(engine\(inputs\), targets\)\)"):
            engine.train_batch([{"inputs": pair[0]}])


def test_errors_inside_forward_stay_as_they_are() -> None:
    with partita.initialize(Stack(2), {}) as engine:
        with pytest.raises(TypeError, match="must be Tensor, not float"):
            engine.train_batch([[0.0]])
