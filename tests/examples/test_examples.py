"""Tests that the examples work, as far as this can be tested without a cluster."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from partita.checkpoint.format.stored import open_stored
from tests.comm.test_launchers import free_job, free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Settings that reduce a job to a run of a second; other tests cover the job's own values of them.
SMALL = "model.width=16 model.layers=1 data.sequence=8 train.steps=4 train.eval_every=4 engine.schedule=null".split()
OVERRIDES = [part for setting in [*SMALL, f"data.corpus={ROOT / 'README.md'}"] for part in ("--set", setting)]


def run(command: Sequence[str | Path], folder: Path, code: int = 0, /, **variables: str) -> str:
    """Run a command with this environment's ``partita`` and ``torchrun`` on its path; return its output.

    It must end with this exit code. Programs in ``folder / "tools"`` come first on its path.
    """
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, module in {"partita": "partita.cli.main", "torchrun": "torch.distributed.run"}.items():
        tool = tools / name
        called = f"from {module} import app; app()" if name == "partita" else f"from {module} import main; main()"
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{called}" "$@"\n')
        tool.chmod(0o755)
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    path = os.pathsep.join([str(tools), str(Path(__file__).parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def saved(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints in a folder."""
    return sorted(path.name for path in folder.iterdir() if (path / "manifest.json").exists())


def ranks_of(checkpoint: Path) -> int:
    found: int = open_stored(checkpoint).manifest["ranks"]
    return found


def slurm(folder: Path, *overrides: str) -> str:
    """Run the Slurm script as two tasks on one node; return its output."""
    shutil.copytree(EXAMPLES, folder / "examples", dirs_exist_ok=True)
    job = {"SLURM_JOB_ID": free_job(), "SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost"}
    every = ["--set", "engine.checkpoint.every_steps=2", *overrides]
    script = ["bash", "examples/slurm.sh", "examples/train_stdlib.yaml", *OVERRIDES, *every]
    return run(script, folder, **job, CHECKPOINTS="kept")


def test_the_slurm_script_runs(tmp_path: Path) -> None:
    slurm(tmp_path)
    assert saved(tmp_path / "kept") == ["step-2", "step-4"]
    assert ranks_of(tmp_path / "kept" / "step-4") == 2


@pytest.mark.thorough
def test_the_slurm_script_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    slurm(tmp_path)
    assert "step-4" in slurm(tmp_path, "--set", "train.steps=6")  # it resumes from step 4
    assert saved(tmp_path / "kept") == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize("code", [0, 1, 130])
def test_the_slurm_script_requeues_a_run_that_was_stopped(tmp_path: Path, code: int) -> None:
    tools = {"srun": f"exit {code}", "scontrol": 'echo "$@" >> called'}
    (tmp_path / "tools").mkdir()
    for name, line in tools.items():
        (tmp_path / "tools" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    run(["bash", EXAMPLES / "slurm.sh"], tmp_path, code, SLURM_JOB_ID="7")
    called = tmp_path / "called"
    assert (called.read_text() if called.exists() else "") == ("requeue 7\n" if code == 130 else "")


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))


def manifest() -> dict[str, Any]:
    """Return the manifest of the TrainJob."""
    return manifests()[1]


def test_the_manifest_is_a_train_job() -> None:
    found = manifest()
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert re.fullmatch("[a-z0-9-]+", found["metadata"]["name"])
    trainer = found["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert f"-t {trainer['image']} ." in (EXAMPLES / "Dockerfile").read_text()


def test_the_jobs_runtime_gives_a_stopped_pod_time_to_save() -> None:
    runtime, job = manifests()
    assert (runtime["apiVersion"], runtime["kind"]) == (job["apiVersion"], job["spec"]["runtimeRef"]["kind"])
    assert runtime["metadata"]["name"] == job["spec"]["runtimeRef"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    variables = {each["name"]: each["value"] for each in job["spec"]["trainer"]["env"]}
    assert 600 <= int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    (mount,) = pod["containers"][0]["volumeMounts"]
    assert mount["name"] == pod["volumes"][0]["name"]
    (setting,) = [word for word in job["spec"]["trainer"]["args"] if word.startswith("engine.checkpoint.dir=")]
    assert setting.startswith(f"engine.checkpoint.dir={mount['mountPath']}/")


def test_the_manifests_command_runs_with_the_operators_variables(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    trainer = manifest()["spec"]["trainer"]
    arguments = [word.replace("/checkpoints", str(tmp_path / "checkpoints")) for word in trainer["args"]]
    pet = {
        "NNODES": "1",
        "NPROC_PER_NODE": "2",
        "NODE_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
    }
    command = [*trainer["command"], *arguments, *OVERRIDES, "--set", "engine.checkpoint.every_steps=4"]
    run(command, tmp_path, **{f"PET_{name}": value for name, value in pet.items()})
    assert ranks_of(tmp_path / "checkpoints" / "stdlib" / "step-4") == 2


def instructions(stage: int) -> Iterator[tuple[str, str]]:
    """Yield (instruction, arguments) for a stage of the Dockerfile."""
    text = (EXAMPLES / "Dockerfile").read_text()
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    found = -1
    for name, _, words in lines:
        found += name == "FROM"
        if found == stage:
            yield name, words


def copied(stage: int) -> list[str]:
    """Return the files and folders that a stage of the Dockerfile copies from the repository."""
    words = [words.split() for name, words in instructions(stage) if name == "COPY" and "--from" not in words]
    return [source for line in words for source in line[:-1]]


def test_the_images_files_are_enough_for_a_wheel(tmp_path: Path) -> None:
    for name in copied(0):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "wheels", "."]
    run(build, tmp_path, SKBUILD_WHEEL_CMAKE="0")  # without kernels: installing partita compiles them
    (wheel,) = (tmp_path / "wheels").iterdir()
    assert wheel.name.startswith("partita-")


def test_the_image_has_what_it_runs() -> None:
    stages = dict(instructions(1))
    assert copied(1) == ["examples"]
    command = json.loads(stages["CMD"])
    assert (ROOT / command[-1]).is_file()
    text = (EXAMPLES / "Dockerfile").read_text()
    extras = re.findall(r"\*\.whl\)\[([a-z,]+)\]", text)[0].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])
    torch_of_image = re.findall(r"torch==([0-9.]+)", text)[0]
    assert f"TORCH ?= torch=={torch_of_image}\n" in (ROOT / "Makefile").read_text()


def test_the_notebooks_cells_run(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join([*cells, "assert losses[-1] < 0.1 * losses[0]"]))
    run([sys.executable, script], tmp_path)
    assert load_file(tmp_path / "runs" / "notebook" / "model.safetensors")["0.weight"].shape == (256, 16)


@pytest.mark.parametrize("name", ["slurm.sh", "kubernetes.yaml", "Dockerfile", "notebook.ipynb"])
def test_files_that_an_example_names_exist(name: str) -> None:
    for found in re.findall(r"examples/[\w.]+", (EXAMPLES / name).read_text()):
        assert (ROOT / found.rstrip(".")).exists(), found
