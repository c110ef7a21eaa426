"""States that cannot fit are refused before anything is allocated, with what would fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import nn

import partita
from partita import PartitaError
from partita.config.schema import Config
from partita.memory import room
from partita.sharding.runtime import Runtime
from tests.local import pool

LAYERS, WIDTH = 24, 1024
STATE_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 16  # fp32: parameters, gradients, two moments


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@contextmanager
def with_free(num_bytes: int) -> Iterator[None]:
    with mock.patch.object(room, "host_memory", return_value=(2**40, num_bytes)):
        yield


def refusal(free: int, config: dict[str, Any]) -> str | None:
    """What is said; nothing was built, and the model is what it was."""
    made = model()
    before = [param.data_ptr() for param in made.parameters()]
    with with_free(free), mock.patch("partita.engine.build.Runtime", wraps=Runtime) as built:
        try:
            with partita.initialize(made, config):
                return None
        except PartitaError as error:
            assert not built.called
            assert [param.data_ptr() for param in made.parameters()] == before
            return str(error)


def test_one_rank_is_told_of_the_disk() -> None:
    own = STATE_BYTES // 4  # what the model's values take now is theirs later, too
    assert refusal(STATE_BYTES - own + 2**16, {}) is None
    said = refusal(STATE_BYTES - own - 2**16, {})
    assert said is not None
    assert "the states of a rank do not fit (memory), and nothing was allocated" in said
    assert "403 MB of states" in said
    assert "  1. zero.offload.optimizer: disk" in said
    assert "zero.stage" not in said


def test_ranks_are_told_of_a_further_stage() -> None:
    free = STATE_BYTES - STATE_BYTES // 4 - 2**16
    for said in pool.run(2, refusal, free, {"zero": {"stage": 0}}):
        assert said is not None
        assert "They would fit with:\n  1. zero.stage: " in said


def test_where_nothing_fits_it_says_so() -> None:
    with pytest.raises(PartitaError, match="No stage and no tier makes them fit"), with_free(-STATE_BYTES):
        partita.initialize(model(), Config())
