"""What the launcher says about this process."""

import re

import pytest

from partita.config import LaunchEnvironment, launch_environment
from partita.errors import ConfigError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
NODE_SIZES = "SLURM_STEP_TASKS_PER_NODE"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        ({"PATH": "/bin", "LOCAL_RANK": "3", "SLURM_NTASKS": "4"}, (0, 1, 0, 1)),
        (TORCHRUN, (5, 8, 1, 4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, (1, 2, 1, 2)),
        (SRUN, (5, 8, 1, 8)),
        (SRUN | {NODE_SIZES: "4(x2)", "SLURM_NODEID": "1"}, (5, 8, 1, 4)),
        (SRUN | {NODE_SIZES: "3,2(x2),1", "SLURM_NODEID": "2"}, (5, 8, 1, 2)),
        (SRUN | {NODE_SIZES: "8"}, (5, 8, 1, 8)),
        (SRUN | TORCHRUN | {"RANK": "6"}, (6, 8, 1, 4)),
    ],
)
def test_launchers(environ: dict[str, str], expected: tuple[int, int, int, int]) -> None:
    assert launch_environment(environ) == LaunchEnvironment(*expected)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RANK": "0"},
            "environment variable WORLD_SIZE is missing although others of the launcher are set; start the",
        ),
        ({"WORLD_SIZE": "2"}, "environment variable RANK is missing"),
        ({"SLURM_PROCID": "0"}, "environment variable SLURM_NTASKS is missing"),
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
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launch_environment() == LaunchEnvironment(3, 4, 0, 1)
