"""Capacity check: states that cannot fit are refused before any allocation, with settings that would fit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch import nn

import partita
from partita import PartitaError
from partita.config.schema import Config
from partita.memory import capacity_check
from partita.sharding.runtime import Runtime
from tests.kit.ranks import on_ranks

LAYERS, WIDTH = 24, 1024
STATE_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 16  # fp32: parameters, gradients, two moments


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@contextmanager
def with_free(num_bytes: int) -> Iterator[None]:
    with mock.patch.object(capacity_check, "host_memory", return_value=(2**40, num_bytes)):
        yield


def refusal(free: int, config: dict[str, Any]) -> str | None:
    """Return the error of ``initialize``, or None. Check that it built nothing and left the model unchanged."""
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


def told(free: int, config: dict[str, Any]) -> list[str]:
    """Return the lines that this rank logs about lower stages."""
    said = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("partita")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with with_free(free), partita.initialize(model(), config):
            return [line for line in said if "would fit, and be faster" in line]
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


PLENTY = 2 * 2 * STATE_BYTES  # two ranks share it, and half is reserved for activations
HALVES = {"batch": {"accumulate": 2}}


@pytest.mark.parametrize(
    ("free", "config", "stage"),
    [
        (PLENTY, {"zero": {"stage": 3}}, 2),
        (PLENTY, {"zero": {"stage": 3}, **HALVES}, 1),
        (PLENTY, {"zero": {"stage": 2}, **HALVES}, 1),
        (PLENTY, {"zero": {"stage": 2}}, None),  # stage 1 sends as much
        (PLENTY, {"zero": {"stage": 1}, **HALVES}, None),
        (PLENTY, {"zero": {"stage": 3, "keep_gathered": True}}, None),
        (PLENTY, {"zero": {"stage": 3, "offload": {"optimizer": "disk"}}}, None),
        (PLENTY, {"zero": {"stage": 3}, "communication": {"gradients": "int8"}}, None),
        (16 * STATE_BYTES // 10, {"zero": {"stage": 3}}, None),  # stage 2 would fit, but leave little for activations
    ],
)
def test_a_lower_stage_is_named_where_it_is_certain_to_fit(
    free: int, config: dict[str, Any], stage: int | None
) -> None:
    first, second = on_ranks(2, told, free, config)
    assert second == []
    assert [line.partition(" would")[0] for line in first] == ([] if stage is None else [f"zero.stage: {stage}"])


def test_one_rank_is_told_of_no_other_stage() -> None:
    assert told(PLENTY, {"zero": {"stage": 3}}) == []


def test_one_rank_is_told_of_the_disk() -> None:
    own = STATE_BYTES // 4  # the current bytes of the model's values count as free
    assert refusal(STATE_BYTES - own + 2**16, {}) is None
    said = refusal(STATE_BYTES - own - 2**16, {})
    assert said is not None
    assert "the states of a rank do not fit (memory), and nothing was allocated" in said
    assert "403 MB of states" in said
    assert "  1. zero.offload.optimizer: disk" in said
    assert "zero.stage" not in said


def test_ranks_are_told_of_a_further_stage() -> None:
    free = STATE_BYTES - STATE_BYTES // 4 - 2**16
    for said in on_ranks(2, refusal, free, {"zero": {"stage": 0}}):
        assert said is not None
        assert "They would fit with:\n  1. zero.stage: " in said


def test_where_nothing_fits_it_says_so() -> None:
    with pytest.raises(PartitaError, match="No stage and no tier makes them fit"), with_free(-STATE_BYTES):
        partita.initialize(model(), Config())
