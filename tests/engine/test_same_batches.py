"""A single warning if all data ranks have the same samples, because they then compute the same gradients."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from tests.kit.models import Stack
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

WARNING = "the 2 data ranks got the same samples in the first 2 batches"


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())


def batch(step: int, own: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + own))


def warnings_of(config: dict[str, Any], same_in: tuple[int, ...], whole_batches: bool) -> list[str]:
    """Train four steps, with equal samples on all data ranks in the steps ``same_in``. Return the warnings."""
    kept, logger = Kept(), logging.getLogger("partita")
    logger.addHandler(kept)
    try:
        with partita.initialize(Stack(2), config, loss_fn=lambda output, batch: output.square().mean()) as engine:
            data = engine.mesh.coordinate("data")
            for step in range(4):
                inputs = batch(step, 0 if step in same_in else data)
                if whole_batches:
                    engine.train_batch([inputs])
                else:
                    engine.backward(engine(inputs).square().mean())
                    engine.step()
    finally:
        logger.removeHandler(kept)
    return [message for message in kept.messages if "same samples" in message]


@pytest.mark.parametrize("whole_batches", [False, True])
def test_the_same_samples_from_the_start_are_one_warning(whole_batches: bool) -> None:
    first, other = on_ranks(2, warnings_of, {"zero": {"stage": 2}}, (0, 1, 2, 3), whole_batches)
    assert len(first) == 1
    assert first[0].startswith(WARNING)
    assert "rank=engine.mesh.coordinate('data')" in first[0]
    assert other == []


@pytest.mark.parametrize("same_in", [(), (0,), (1, 2, 3)])
def test_samples_of_their_own_are_no_warning(same_in: tuple[int, ...]) -> None:
    assert on_ranks(2, warnings_of, {"zero": {"stage": 3}}, same_in, False) == [[], []]


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"sequence": 2}])
def test_ranks_that_share_samples_are_not_compared(parallel: dict[str, int]) -> None:
    if "sequence" in parallel:
        assert on_ranks(2, language_model, parallel) == [[], []]
    else:
        assert on_ranks(2, warnings_of, {"parallel": parallel}, (0, 1, 2, 3), True) == [[], []]


def language_model(parallel: dict[str, int]) -> list[str]:
    from tests.kit import CASES

    kept, logger, case = Kept(), logging.getLogger("partita"), CASES["llama"]
    logger.addHandler(kept)
    try:
        with partita.initialize(case.build(), {"parallel": parallel}, loss_fn=case.loss_of_batch) as engine:
            for step in range(3):
                engine.train_batch([case.batch(2, step)])
    finally:
        logger.removeHandler(kept)
    assert rank() in (0, 1)
    return [message for message in kept.messages if "same samples" in message]
