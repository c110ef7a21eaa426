"""Training under each launcher: ranks read its environment variables, connect, and train."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

import partita
from partita import ConfigError, PartitaError
from partita.comm import world
from partita.config.launchers import launch_environment
from tests.kit.models import Stack, square_loss
from tests.kit.ranks import on_ranks

RANKS = 2
SLURM = {
    "SLURM_NTASKS": str(RANKS),
    "SLURM_NNODES": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": str(RANKS),
    "SLURM_STEP_NODELIST": "localhost",
}
POD = {"MASTER_ADDR": "localhost", "WORLD_SIZE": str(RANKS)}


def is_free(port: int) -> bool:
    with closing(socket.socket()) as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> str:
    with closing(socket.socket()) as tried:
        tried.bind(("127.0.0.1", 0))
        return str(tried.getsockname()[1])


def free_job() -> str:
    """Return the number of a Slurm job whose port is free."""
    for job in map(str, range(os.getpid(), os.getpid() + 1000)):
        url = launch_environment(SLURM | {"SLURM_PROCID": "0", "SLURM_JOB_ID": job}).url
        if is_free(int(url.rpartition(":")[2])):
            return job
    raise AssertionError("no port is free")


def trained(rank: int) -> tuple[int, int]:
    """Train with two engines in turn. Return the rank and the number of ranks."""
    for step in range(2):
        with partita.initialize(Stack(1), {"zero": {"stage": 3}, "communication": {"timeout_s": 30.0}}) as engine:
            engine.backward(square_loss(engine, rank, step))
            assert engine.step().stepped
            found = engine.mesh.rank, engine.mesh.num_ranks
    return found


def under(variables: Mapping[str, str], rank_in: str) -> tuple[int, int]:
    rank = int(os.environ["RANK"])
    with mock.patch.dict(os.environ, variables, clear=True):
        for name in rank_in.split():
            os.environ[name] = str(rank)
        return trained(rank)


LAUNCHERS = {
    "srun": (lambda: SLURM | {"SLURM_JOB_ID": free_job()}, "SLURM_PROCID SLURM_LOCALID"),
    "srun, with an address": (
        lambda: SLURM | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()},
        "SLURM_PROCID SLURM_LOCALID",
    ),
    "PyTorchJob": (lambda: POD | {"MASTER_PORT": free_port()}, "RANK"),
    "Indexed Job": (lambda: POD | {"MASTER_PORT": free_port()}, "JOB_COMPLETION_INDEX"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_find_each_other(launcher: str) -> None:
    variables, rank_in = LAUNCHERS[launcher]
    base = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR")}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    assert on_ranks(RANKS, under, base | loopback | variables(), rank_in, with_group=False) == [(0, 2), (1, 2)]


def restarted(counts: Sequence[int]) -> tuple[int, int]:
    rank = int(os.environ["RANK"])
    with mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": str(counts[rank])}):
        return trained(rank)


@pytest.mark.parametrize("counts", [(1, 0), (0, 1)])
def test_nodes_that_count_different_numbers_of_restarts(counts: Sequence[int]) -> None:
    """torchrun counts a restart only on the node whose processes failed, and from 0 on a node that joins."""
    assert on_ranks(RANKS, restarted, counts, with_group=False) == [(0, 2), (1, 2)]


def trained_after_a_failed_round() -> tuple[int, int]:
    """Train in a second round on the same store. In the first, rank 0 is missing, and rank 1 leaves a request."""
    rank = int(os.environ["RANK"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=30))
    if rank == 1:
        with pytest.raises(PartitaError, match="rank 1 of 2 did not reach the others"):
            partita.initialize(Stack(1), {"communication": {"timeout_s": 0.5}})
        left = store.get("partita/request/1").decode()
        store.set("failed", "")
        store.wait([f"partita/answer/{left}"])  # rank 0 has seen the request of the first round
    else:
        store.wait(["failed"])
    with mock.patch.object(world, "_here", world._Started()):  # as in a new process
        return trained(rank)


def test_a_round_after_one_that_failed() -> None:
    assert on_ranks(RANKS, trained_after_a_failed_round, with_group=False) == [(0, 2), (1, 2)]


def trained_in_rounds() -> tuple[int, int]:
    """Train in rounds on one store, as after restarts in which all processes were replaced."""
    for _ in range(3):
        with mock.patch.object(world, "_here", world._Started()):
            found = trained(int(os.environ["RANK"]))
    return found


def test_rounds_on_one_store() -> None:
    assert on_ranks(RANKS, trained_in_rounds, with_group=False) == [(0, 2), (1, 2)]


def own_group() -> tuple[int, int]:
    """Train as under ``torch.multiprocessing.spawn``, where only the user's process group knows rank and size."""
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        found = trained(dist.get_rank())
    sum_of_ranks = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(sum_of_ranks)
    assert sum_of_ranks.item() == 1.0, "the group stays the user's"
    return found


def test_the_users_own_group() -> None:
    assert on_ranks(RANKS, own_group) == [(0, 2), (1, 2)]


ONE_PROCESS = {
    "python, or a notebook": {},
    "a shell of salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "nowhere"},
    "a script of sbatch": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "an Indexed Job of single pods": {"JOB_COMPLETION_INDEX": "3"},
}


@pytest.mark.parametrize("started", ONE_PROCESS)
def test_one_process(started: str) -> None:
    with mock.patch.dict(os.environ, ONE_PROCESS[started]):
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        assert trained(0) == (0, 1)
        assert not dist.is_initialized()


def test_what_is_missing_is_named() -> None:
    with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):
        os.environ.pop("MASTER_ADDR", None)
        with pytest.raises(ConfigError, match="environment variable MASTER_ADDR is missing: 2 ranks connect"):
            partita.initialize(Stack(1))
