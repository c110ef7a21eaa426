"""Out-of-memory errors: they list the memory in use and remedies, and the engine remains usable."""

import errno
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

import partita
from partita import PartitaError
from partita.memory import allocate
from partita.memory.out_of_memory import is_out_of_memory
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks
from tests.kit.training import rank

OUT = RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried ...")
SAID = (
    r"(?s)out of memory in {}, on rank \d \(cpu\): .*parameters +device.*What would help most:\n  1\. .* \(frees about "
)
BATCH = {"batch": {"micro": 8}}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OUT,
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried ..."),
        OSError(errno.ENOMEM, "no memory"),
    ],
)
def test_what_is_a_lack_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape"), OSError(errno.ENOSPC, "disk"), PartitaError("can't allocate memory"), KeyError()]
)
def test_what_is_none(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def deep() -> nn.Module:
    """Return a model whose units exceed a bucket; with the disk tier, only a few are in memory at a time."""
    return nn.Sequential(nn.Linear(16, 1024), *(nn.Linear(1024, 1024) for _ in range(16)), nn.Linear(1024, 16))


def fails_in_forward(engine: partita.Engine) -> None:
    hook = engine.module.get_submodule("17").register_forward_hook(mock.Mock(side_effect=OUT))
    try:
        square_loss(engine, rank(), 0)
    finally:
        hook.remove()


def fails_in_backward(engine: partita.Engine) -> None:
    loss = square_loss(engine, rank(), 0)
    with mock.patch.object(torch.autograd, "backward", side_effect=MemoryError()):
        engine.backward(loss)


def fails_in_step(engine: partita.Engine) -> None:
    engine.backward(square_loss(engine, rank(), 0))
    with mock.patch.object(engine.optimizer, "step", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        engine.step()


@pytest.mark.parametrize(
    ("where", "fails"), [("forward", fails_in_forward), ("backward", fails_in_backward), ("step", fails_in_step)]
)
def test_the_error_says_who_holds_what(where: str, fails: Callable[[partita.Engine], None]) -> None:
    with partita.initialize(deep(), BATCH) as engine:
        with pytest.raises(PartitaError, match=SAID.format(where)) as caught:
            fails(engine)
        assert is_out_of_memory(caught.value.__cause__)
        assert "zero.offload.optimizer: disk" in str(caught.value)
        engine.zero_grad()
        engine.backward(square_loss(engine, rank(), 1))
        assert engine.step().stepped


def test_in_initialize() -> None:
    real, calls = allocate.Mapping, []

    def mapping(num_bytes: int) -> allocate.Mapping:
        calls.append(num_bytes)
        if len(calls) > 5:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(num_bytes)

    with mock.patch.object(allocate, "Mapping", mapping), pytest.raises(PartitaError, match=SAID.format("initialize")):
        partita.initialize(deep(), {"zero": {"stage": 1}})


def stages_are_named() -> None:
    with partita.initialize(deep(), {"zero": {"stage": 0}}) as engine:
        with pytest.raises(PartitaError, match=r"zero.stage: \d .frees"):
            fails_in_forward(engine)


def test_a_higher_stage_helps_several_ranks() -> None:
    on_ranks(2, stages_are_named)


def test_other_errors_stay_what_they_are() -> None:
    with partita.initialize(Stack(1)) as engine, pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.ones(2, 3))
