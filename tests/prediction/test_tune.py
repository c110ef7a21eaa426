"""``partita tune``: trials in the order of predicted times, then changes of the best; a failure is an outcome."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import partita
from partita import ConfigError
from partita.cli.main import app
from partita.config.schema import Config
from partita.memory.capacity import usable_cores
from partita.prediction.machine import Machine, write_machine
from partita.prediction.model_source import read_source
from partita.prediction.tune import trial_rank
from partita.prediction.tune.space import Space
from partita.prediction.tune.target import Target
from partita.prediction.tune.trial import TrialResult, Trials, TrialTask
from partita.prediction.tune.tune import Effort, Trial
from partita.train.job import load_job

MODEL = "layers=2,hidden=64,heads=2,vocab=128,context=32"
RATES = {"tflops": 0.05, "tflops_fp32": 0.05, "memory_rate": 4e9, "node_link": 1e9, "network": 1e9, "host_rate": 8e9}
SIZES = {"memory": 2e9, "host_memory": 2e9, "disk": 1e9, "disk_rate": 1e8, "host_link": 0.0}
CPU = Machine("two cores", gpus=2, **RATES, **SIZES, one_memory=True)
# Only the data axis: a small search space is quick to predict.
BASE: dict[str, Any] = {"parallel": {"tensor": 1}, "batch": {"total": 8}}

# Settings that conflict with every plan, and a list of modules, which no plan can express.
ZERO = {"stage": 3, "keep_gathered": True, "keep_gradients": True}
KEPT = {**BASE, "zero": ZERO, "activations": {"checkpoint": ["blocks.0"]}}

Measure = Callable[[dict[str, Any]], TrialResult]
run = CliRunner().invoke


def tuned(measure: Measure, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    """Tune with trials whose results are those of ``measure`` for their configs."""
    monkeypatch.setattr(Trials, "run", lambda _, config: measure(config))
    given = {"processes": 2, "machine": CPU, "config": BASE} | changed
    return partita.tune(given.pop("model", MODEL), **given)


def never(config: dict[str, Any]) -> TrialResult:
    raise AssertionError(f"measured: {config}")


@pytest.mark.skipif(usable_cores() < 2, reason="two ranks have a core each")
def test_a_job_is_tuned_by_processes_of_its_own_and_goes_on_from_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_machine(CPU, tmp_path / "cpu.yaml")
    engine = {**BASE, "zero": {"stage": 3}, "checkpoint": {"dir": str(tmp_path / "saved"), "every_steps": 1}}
    job = {"model": {"layers": 1, "width": 32, "heads": 2}, "data": {"sequence": 16}, "engine": engine}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    words = ["tune", "job.yaml", "--processes", "2", "--gpu", "cpu.yaml", "--trials", "1", "--out", "best.yaml"]
    first = run(app, words)
    assert first.exit_code == 0, first.output
    assert "1 trial;" in first.output
    rows = [json.loads(line) for line in (tmp_path / "tune.jsonl").read_text().splitlines()]
    assert rows[0]["of"]["processes"] == 2
    (trial,) = rows[1:]
    assert trial["config"]["zero"]["stage"] == 3, "as the job says"
    assert trial["outcome"]["step_s"] > 0, trial
    assert 1e5 < trial["outcome"]["peak_bytes"] < 1e7
    assert trial["config"]["batch"]["micro"] * trial["config"]["batch"]["accumulate"] * 2 == 8
    assert not (tmp_path / "saved").exists(), "trials leave no checkpoints"
    best = load_job(tmp_path / "best.yaml")
    assert best.model.width == 32
    assert best.engine.checkpoint.dir == str(tmp_path / "saved")
    monkeypatch.setattr(Trials, "run", lambda _, config: never(config))
    again = run(app, [*words, "--overwrite"])
    assert again.exit_code == 0, again.output
    assert "1 trial;" in again.output


def test_the_predicted_order_then_changes_of_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Trial]()

    def measure(config: dict[str, Any]) -> TrialResult:
        """Return a result that contradicts the predictions: small micro-batches at stage 3 are the fastest."""
        return TrialResult(1.0 + 0.1 * config["batch"]["micro"] - 0.2 * config["zero"]["stage"], 1000)

    found = tuned(measure, monkeypatch, on_trial=told.append, effort=Effort(trials=40))
    assert list(found.trials) == told
    starts = [trial for trial in told if not trial.candidate.change]
    assert 1 <= len(starts) <= 3
    assert [each.candidate.seconds for each in starts] == sorted(each.candidate.seconds for each in starts)
    assert found.complete
    assert (found.config()["zero"]["stage"], found.config()["batch"]) == (3, {"micro": 1, "accumulate": 4})
    assert len({trial.candidate.key for trial in told}) == len(told), "none is tried twice"


def test_without_a_gain_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuning ends when no change gains at least 2%."""
    times, origins, neighbours = iter(range(100)), list[str](), Space.neighbours
    monkeypatch.setattr(
        Space, "neighbours", lambda self, origin: origins.append(origin.key) or neighbours(self, origin)
    )
    found = tuned(lambda _: TrialResult(1.0 - 0.0001 * next(times), 1), monkeypatch, effort=Effort(trials=90))
    assert found.complete
    assert len(origins) == 1
    assert len(found.trials) > 3, "changes were tried"
    few = tuned(lambda _: TrialResult(1.0, 1), monkeypatch, effort=Effort(trials=2))
    assert (len(few.trials), few.complete) == (2, False)


@pytest.mark.parametrize(
    ("batch", "samples", "expected"),
    [
        ({}, 8, {"micro": 4, "accumulate": 1}),
        ({"micro": 2}, 64, {"micro": 2, "accumulate": 16}),
        ({"micro": 3}, 8, None),
        ({"micro": 2, "accumulate": 3}, 12, {"micro": 2, "accumulate": 3}),
    ],
)
def test_the_user_s_config_has_the_samples_of_every_trial(
    batch: dict[str, int], samples: int, expected: dict[str, int] | None
) -> None:
    given = {"parallel": {"tensor": 1}, "zero": {"stage": 2}, "batch": batch}
    found = Space(read_source(MODEL), CPU, 2, Config(**given), samples, "cpu").user_candidate()
    assert (None if found is None else found.config["batch"]) == expected


def test_where_parameters_are_gathered_that_is_changed_too() -> None:
    source = read_source(MODEL)
    given = {**BASE, "zero": {"stage": 3, "prefetch_bytes": 4096}, "optimizer": {"lr": 0.1}}
    space = Space(source, CPU, 2, Config(**given), 8, "cpu", 2)
    origin = space.user_candidate()
    assert origin is not None
    assert origin.config == {**given, "batch": {"micro": 4, "accumulate": 1}, "precision": {"compute": "fp32"}}
    by_move = {each.change: each for each in space.neighbours(origin)}
    changed = {change: each.config["zero"] for change, each in by_move.items()}
    assert changed["prefetch 8192 bytes"]["prefetch_bytes"] == 8192
    assert changed["prefetch 2048 bytes"]["prefetch_bytes"] == 2048
    assert changed["kept after forward"]["keep_gathered"] is True
    assert changed["stage 2"] == {"stage": 2}
    (units,) = (zero["units"] for change, zero in changed.items() if change.startswith("units "))
    classes = {type(module).__name__ for module in source.model.modules()}
    assert set(units) <= classes
    assert by_move["micro-batch halved"].config["batch"] == {"micro": 2, "accumulate": 2}
    assert all(each.config["optimizer"] == {"lr": 0.1} for each in by_move.values()), "what is not searched stays"


def test_slices_of_samples_are_tuned_where_the_config_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"checkpoint": "units", "offload": "disk"}
    given = {"parallel": {"sequence": 2}, "batch": {"total": 8}, "activations": inputs}
    first, *others = tuned(lambda _: TrialResult(1.0, 1), monkeypatch, config=given, effort=Effort(trials=9)).trials
    assert first.candidate.settings.inputs == "disk"
    assert first.candidate.config["activations"] == inputs
    assert {trial.candidate.settings.mesh.sequence for trial in others} == {2}
    assert {"checkpoint": "none"} not in [trial.candidate.config.get("activations") for trial in others]
    rest = [trial.candidate for trial in others if trial.candidate.settings.inputs == "none"]
    assert [each.config for each in rest if "offload" in each.config.get("activations", {})] == []


def test_what_lacks_memory_is_tried_with_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(config: Mapping[str, Any]) -> TrialResult:
        fits = config["batch"]["micro"] < 2
        return TrialResult(1.0, 1) if fits else TrialResult(failed="rank 1: out of memory", lacks_memory=True)

    found = tuned(measure, monkeypatch, effort=Effort(trials=40))
    assert found.config()["batch"]["micro"] == 1
    by_key = {trial.candidate.key: trial for trial in found.trials}
    assert any(trial.outcome.lacks_memory for trial in by_key.values())
    with pytest.raises(ConfigError, match=r"all \d+ trials failed:\n.*it broke"):
        tuned(lambda _: TrialResult(failed="it broke"), monkeypatch, effort=Effort(trials=2))


@pytest.mark.parametrize("tier", ["none", "host", "disk"])
def test_a_trial_has_the_bytes_of_every_tier_but_the_disk(tier: str) -> None:
    config = {"zero": {"offload": {"optimizer": tier}}, "batch": {"micro": 2}}
    task = TrialTask(Target(MODEL, 32, ()), config, rank=0, ranks=1, port=0, threads=torch.get_num_threads(), steps=1)
    states = 16 * read_source(MODEL).num_params
    least = states // 4 if tier == "disk" else states
    assert least < trial_rank.measure(task)["peak_bytes"] < 2 * states


def test_results_of_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "found.jsonl"
    given: dict[str, Any] = {"results": file, "effort": Effort(trials=3)}
    first = tuned(lambda config: TrialResult(1.0, len(config)), monkeypatch, **given)
    cut = file.read_text()[:-20]
    file.write_text(cut)
    configs = list[dict[str, Any]]()
    again = tuned(lambda config: configs.append(config) or TrialResult(1.0, 7), monkeypatch, **given)
    assert configs == [first.trials[2].candidate.config], "of a line that was cut off"
    assert [trial.outcome.peak_bytes for trial in again.trials][:2] == [t.outcome.peak_bytes for t in first.trials][:2]
    with pytest.raises(ConfigError, match="from another tuning: the model: expected 'layers=1.*got 'layers=2"):
        tuned(never, monkeypatch, model=MODEL.replace("layers=2", "layers=1"), **given)
    with pytest.raises(ConfigError, match="from another tuning: samples of a step: expected 16, got 8"):
        tuned(never, monkeypatch, samples=16, **given)
    lines = file.read_text().splitlines()
    other = json.loads(lines[0])
    other["of"]["device"] = "another"
    file.write_text("\n".join([json.dumps(other), *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match="from another tuning: the machine: .*got 'another'"):
        tuned(never, monkeypatch, **given)
    file.write_text("[1]\n{}\n")
    with pytest.raises(ConfigError, match="is no file of partita tune"):
        tuned(never, monkeypatch, **given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "llama-3-9b"}, "there is no preset, file or folder of this name"),
        ({"model": "none.yaml"}, r"config file 'none.yaml' does not exist"),
        ({"processes": 10_000}, "--processes: expected 1 to .*; got 10000"),
        ({"samples": 0}, "samples: expected at least 1 sample in a step; got 0"),
        ({"config": KEPT}, "every plan that fits conflicts with the config: .*keep_gradients"),
        ({"model": "layers=60,hidden=8192"}, "layers=60,hidden=8192 does not fit on 2 x two cores"),
    ],
)
def test_mistakes_are_named(changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=message):
        tuned(never, monkeypatch, **changed)


def test_it_is_not_run_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="without a launcher"):
        tuned(never, monkeypatch)


CODE = """
import os, signal, time
import torch


class Model(torch.nn.Linear):
    def forward(self, x):
        {work}
        return super().forward(x).sum()


def build():
    return Model(4, 4), (torch.zeros(1, 4),)
"""


@pytest.mark.parametrize(
    ("work", "timeout_s", "message", "lacks_memory"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, "rank 0 was ended by SIGKILL; Linux", True),
        ("raise MemoryError('no more of it')", 60, "rank 0: PartitaError: out of memory in", True),
        ("time.sleep(600)", 1, "did not end within 1 s", False),
    ],
)
def test_a_trial_survives_whatever_happens(
    work: str, timeout_s: float, message: str, lacks_memory: bool, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(CODE.format(work=work))
    found = Trials(Target(f"{tmp_path / 'model.py'}:build"), 1, 1, timeout_s).run({"batch": {"micro": 2}})
    assert found.step_s is None
    assert found.failed.startswith(message)
    assert found.lacks_memory is lacks_memory
