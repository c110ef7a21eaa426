"""Tests of errors while the accelerator waits for a rank that has ended: an engine closes without waiting for it."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from torch import nn

import partita
from partita import PartitaError
from partita.comm import mesh
from partita.memory import accelerator
from tests.kit.ranks import on_ranks
from tests.kit.training import rank
from tests.simulated.device import register
from tests.simulated.training import on, open_engine, simulated, train_step


@contextmanager
def stuck_device(is_stuck: bool = True) -> Iterator[threading.Event]:
    """Let work on the device end only when a process group is aborted, which sets the event; or if not ``is_stuck``, at
    once.
    """
    register()
    from tests.simulated.group import Group  # its import needs the registered device

    aborted = threading.Event()
    with (
        mock.patch.object(Group, "abort", side_effect=aborted.set),
        mock.patch.object(accelerator, "wait_for_all", side_effect=lambda device: is_stuck and aborted.wait()),
    ):
        yield aborted


def leaves() -> str:
    """End rank 1 with an error. Return this rank's error."""
    with stuck_device() as aborted:
        try:
            with open_engine(on(1)) as engine:
                train_step(engine, 0, None)
                if rank() == 1:
                    raise ValueError("the data of step 1\nis missing")
                train_step(engine, 1, None)
        except (ValueError, PartitaError) as error:
            assert aborted.is_set()
            return str(error)
    return ""


def test_an_engine_closes_while_the_device_waits_for_a_rank_that_has_ended() -> None:
    (said, _), (own, _) = on_ranks(2, simulated, leaves, with_group=False, timeout=60)
    assert "rank 1 ended with ValueError: the data of step 1" in said.partition("\n")[0]
    assert own == "the data of step 1\nis missing"


def fails_beside_another(is_stuck: bool) -> bool:
    """End an engine by an error on all ranks, and train another on its mesh. Return whether groups were aborted."""
    with mock.patch.object(mesh, "GRACE_S", 0.1), stuck_device(is_stuck) as aborted, open_engine(on(1)) as other:
        with contextlib.suppress(ValueError), partita.initialize(nn.Linear(2, 2), {}, mesh=other.mesh):
            raise ValueError("the data of step 1 is missing")
        train_step(other, 0, None)
        return aborted.is_set()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_connections_that_another_engine_uses_are_aborted_only_if_the_device_is_stuck(is_stuck: bool) -> None:
    for was_aborted, _ in on_ranks(2, simulated, fails_beside_another, is_stuck, with_group=False, timeout=60):
        assert was_aborted == is_stuck
