"""Ray Train runs a job on two workers, and restarts it when one of them is killed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray.train

import partita
from partita import ConfigError, PartitaError
from partita.config.launchers import LaunchEnvironment, launch_environment, set_launch_environment
from partita.integrations.ray import PartitaTorchConfig, checkpoints, report
from tests.integrations.ray.job import EVERY, NUM_STEPS, losses_of
from tests.kit.ranks import on_ranks

ROOT = Path(__file__).parents[3]
DIES_AT = 3


def whole_run() -> list[float]:
    """Return this rank's losses of the job without a killed rank."""
    return [loss for _, loss in losses_of(stage=3, dies_at=None)]


def run(folder: Path, stage: int, *dies_at: int) -> Any:
    """Run a job in its own process, which leaves no processes behind; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.ray.job", folder, str(stage), *map(str, dies_at)],
        cwd=ROOT,
        env=os.environ | {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_killed_worker_is_started_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    found = run(tmp_path, 3, DIES_AT)
    last = DIES_AT - DIES_AT % EVERY
    for of_rank, expected in zip(found["losses"], on_ranks(2, whole_run, with_group=False), strict=True):
        steps = [*range(DIES_AT + 1), *range(last, NUM_STEPS)]
        assert of_rank == [[step, expected[step]] for step in steps]
    assert found["kept"] == [["step-4"], ["step-6"]]
    assert found["metrics"] == {"step": NUM_STEPS - 1}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_runs_under_ray(tmp_path: Path, stage: int) -> None:
    found = run(tmp_path, stage)
    for of_rank, expected in zip(found["losses"], on_ranks(2, whole_run, with_group=False), strict=True):
        assert of_rank == [[step, expected[step]] for step in range(NUM_STEPS)]


def test_storage_that_is_no_file_system_is_refused() -> None:
    context = SimpleNamespace(
        get_storage=lambda: SimpleNamespace(storage_filesystem=SimpleNamespace(type_name="s3")),
        get_world_rank=lambda: 0,
    )
    with mock.patch.object(ray.train, "get_context", return_value=context):
        with pytest.raises(PartitaError, match="the run's storage is on 's3'.* RunConfig\\(storage_path=\\)"):
            report(mock.create_autospec(partita.Engine), {})


@pytest.mark.parametrize("argument", [{"backend": "nccl"}, {"timeout_s": 60}])
def test_settings_of_a_group_that_ray_does_not_start(argument: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=rf"PartitaTorchConfig\({next(iter(argument))}=...\): .* communication.timeout_s"
    ):
        PartitaTorchConfig(**argument)


def test_the_first_start_resumes_nothing() -> None:
    with mock.patch.object(ray.train, "get_checkpoint", return_value=None):
        assert checkpoints.resume(mock.create_autospec(partita.Engine)) is None


@pytest.mark.parametrize("host", ["10.0.0.1", "fe80::1"])
def test_a_worker_is_told_who_it_is(host: str) -> None:
    told = LaunchEnvironment(rank=3, world_size=4, local_rank=1, local_world_size=2)
    with mock.patch.dict(os.environ):
        set_launch_environment(told, host, 1234)
        found = launch_environment()
    url = f"tcp://[{host}]:1234" if ":" in host else f"tcp://{host}:1234"
    assert found == LaunchEnvironment(3, 4, 1, 2, found.restarts, url)
