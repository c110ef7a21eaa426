"""Settings of this process in the environment variables of launchers."""

import os
import re
from unittest import mock

import pytest

from partita.config.launchers import LaunchEnvironment, launch_environment, set_torch_variables
from partita.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
MEET = "tcp://10.0.0.1:29500"
PODS = {"MASTER_ADDR": "first.train", "MASTER_PORT": "23456", "WORLD_SIZE": "2"}
PODS_MEET = "tcp://first.train:23456"
NODE_SIZES, HOSTS = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
# Variables that sbatch sets for its script, and salloc for its shell; and those that srun adds for its tasks.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[1-2]"}
BATCH = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "4(x2)"}
TASK = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "3", HOSTS: "a[1-2]"}
SRUN = ALLOCATION | TASK
SRUN_MEET = "tcp://a1:10220"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, None, 1)),
        ({"PATH": "/bin", "LOCAL_RANK": "3"}, (0, 1, None, 1)),
        (TORCHRUN, (5, 8, 1, 4, 0, MEET)),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}, (5, 8, 1, 4, 2, MEET)),
        (TORCHRUN | {"MASTER_ADDR": "fe80::1"}, (5, 8, 1, 4, 0, "tcp://[fe80::1]:29500")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, None, 1)),
        (PODS | {"RANK": "1"}, (1, 2, None, 1, 0, PODS_MEET)),
        (PODS | {"RANK": "1", "LOCAL_RANK": "1"}, (1, 2, 1, 2, 0, PODS_MEET)),
        (PODS | {"JOB_COMPLETION_INDEX": "1"}, (1, 2, None, 1, 0, PODS_MEET)),
        (PODS | {"JOB_COMPLETION_INDEX": "7", "RANK": "1"}, (1, 2, None, 1, 0, PODS_MEET)),
        ({"JOB_COMPLETION_INDEX": "7"}, (0, 1, None, 1)),
        (ALLOCATION, (0, 1, None, 1)),
        (BATCH, (0, 1, None, 1)),
        (SRUN, (5, 8, 1, 4, 0, SRUN_MEET)),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "6"}, (5, 6, 1, 3, 0, SRUN_MEET)),
        (ALLOCATION | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, None)),
        (SRUN | {"SLURM_NTASKS_PER_NODE": "5"}, (5, 8, 1, 5, 0, SRUN_MEET)),
        (SRUN | {NODE_SIZES: "4(x2)", "SLURM_NODEID": "1"}, (5, 8, 1, 4, 0, SRUN_MEET)),
        (SRUN | {NODE_SIZES: "3,2(x2),1", "SLURM_NODEID": "2"}, (5, 8, 1, 2, 0, SRUN_MEET)),
        (SRUN | {"MASTER_ADDR": "b", "MASTER_PORT": "9"}, (5, 8, 1, 4, 0, "tcp://b:9")),
        (SRUN | {"WORLD_SIZE": "3", "MASTER_PORT": "9"}, (5, 8, 1, 4, 0, "tcp://a1:9")),
        (SRUN | TORCHRUN | {"RANK": "6"}, (6, 8, 1, 4, 0, MEET)),
    ],
)
def test_launchers(environ: dict[str, str], expected: tuple[int, int, int, int]) -> None:
    assert launch_environment(environ) == LaunchEnvironment(*expected)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a.b-c,d", "a.b-c"),
        ("node[007-009,12],gpu1", "node007"),
        ("node[12,14-15]", "node12"),
        ("rack[2-3]-n[05,07]", "rack2-n05"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    for environ in (SRUN | {HOSTS: hosts}, {key: value for key, value in SRUN.items() if key != HOSTS}):
        environ = environ | ({} if HOSTS in environ else {"SLURM_JOB_NODELIST": hosts})
        assert launch_environment(environ).url == f"tcp://{first}:10220"


def test_steps_of_a_job_meet_at_ports_of_their_own() -> None:
    urls = {launch_environment(SRUN | {"SLURM_STEP_ID": step}).url for step in ("0", "1", "2")}
    assert len(urls) == 3


@pytest.mark.parametrize("environ", [{}, TORCHRUN, {"RANK": "", "WORLD_SIZE": "2"}, ALLOCATION])
def test_a_group_that_runs_takes_precedence(environ: dict[str, str]) -> None:
    found = launch_environment(environ, running=(2, 4))
    local = (1, 4) if environ is TORCHRUN else (None, 1)
    assert found == LaunchEnvironment(2, 4, *local)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            without(TORCHRUN, "MASTER_ADDR"),
            "environment variable MASTER_ADDR is missing: 8 ranks connect to rank 0's host",
        ),
        (
            without(TORCHRUN, "MASTER_PORT"),
            "environment variable MASTER_PORT is missing: 8 ranks connect to a port of 10.0.0.1; set",
        ),
        (TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT: expected a whole number from 1 to 65535; got '65536'"),
        ({"JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "a"}, "environment variable WORLD_SIZE is missing"),
        (
            without(SRUN, HOSTS, "SLURM_JOB_NODELIST"),
            f"environment variable MASTER_ADDR is missing (or {HOSTS}, or SLURM_JOB_NODELIST): 8 ranks",
        ),
        (without(SRUN, "SLURM_JOB_ID"), "environment variable MASTER_PORT is missing (or SLURM_JOB_ID): 8 ranks"),
        (
            SRUN | {HOSTS: "a[1"},
            f"environment variable {HOSTS}: expected hosts such as 'node[07-09,12],gpu1'; got 'a[1'",
        ),
        (
            {"RANK": "0"},
            "environment variable WORLD_SIZE is missing, but other variables of the launcher are set; start the",
        ),
        ({"WORLD_SIZE": "2"}, "environment variable RANK is missing"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "environment variable SLURM_NTASKS is missing"),
        (TORCHRUN | {"RANK": "8"}, "environment variable RANK: expected a whole number from 0 to 7; got '8'"),
        (TORCHRUN | {"RANK": "-1"}, "environment variable RANK: expected a whole number from 0 to 7; got '-1'"),
        (TORCHRUN | {"RANK": ""}, "environment variable RANK: expected a whole number from 0 to 7; got ''"),
        (TORCHRUN | {"RANK": "²"}, "environment variable RANK: expected"),
        (
            TORCHRUN | {"WORLD_SIZE": "0"},
            "environment variable WORLD_SIZE: expected a whole number of at least 1; got '0'",
        ),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "environment variable WORLD_SIZE: expected"),
        (
            TORCHRUN | {"LOCAL_RANK": "4"},
            "environment variable LOCAL_RANK: expected a whole number from 0 to 3; got '4'",
        ),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "9"},
            "environment variable LOCAL_WORLD_SIZE: expected a whole number from 1 to 8",
        ),
        (SRUN | {NODE_SIZES: "4(y2)"}, f"environment variable {NODE_SIZES}: expected tasks per node such as '2(x3),1'"),
        (SRUN | {NODE_SIZES: "4,4", "SLURM_NODEID": "2"}, "with an entry for SLURM_NODEID; got '4,4'"),
        (
            SRUN | {NODE_SIZES: "1,7"},
            "environment variable SLURM_LOCALID: expected a whole number from 0 to 0; got '1'",
        ),
    ],
)
def test_malformed_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch_environment(environ)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_PROCID", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (PODS | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    assert launch_environment() == LaunchEnvironment(1, 2, None, 1, 0, PODS_MEET)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SRUN, TORCHRUN | {"MASTER_ADDR": "a1", "MASTER_PORT": "10220"}),
        (TORCHRUN | {"MASTER_ADDR": "Here"}, TORCHRUN | {"MASTER_ADDR": "Here"}),
        (PODS | {"JOB_COMPLETION_INDEX": "1"}, PODS),
        (BATCH, {}),
    ],
)
def test_what_srun_tells_in_the_words_of_torchrun(environ: dict[str, str], expected: dict[str, str]) -> None:
    with mock.patch.dict(os.environ, environ, clear=True):
        set_torch_variables()
        assert {
            name: value for name, value in os.environ.items() if name not in environ or name in TORCHRUN
        } == expected
