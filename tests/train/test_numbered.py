"""Runs into the default folder are numbered; a folder that the job names is not replaced."""

from pathlib import Path

import pytest

from tests.cli.processes import write_job
from tests.cli.test_main import invoke

SHORT = ["train.steps=1", "train.sample.tokens=0", "train.metrics=[]"]


def trained(job: Path, *settings: str) -> tuple[int, str]:
    return invoke("train", job, "--processes", "1", *(f"--set={each}" for each in (*SHORT, *settings)))


def test_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    job.write_text(job.read_text().replace(f"out: {tmp_path / 'out'}, ", ""))
    for folder in ("runs/job", "runs/job-2", "runs/job-3"):
        code, shown = trained(job)
        assert code == 0, shown
        assert (Path(folder) / "job.yaml").exists()
        assert (f"'runs/job' holds an earlier run; this one writes into '{folder}'" in shown) is (folder != "runs/job")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["job", "job-2", "job-3"]
    assert trained(job, "train.overwrite=true")[0] == 0
    assert len(list(Path("runs").iterdir())) == 3
    code, shown = trained(job, "train.out=runs/job-2")
    assert code == 2
    assert "'runs/job-2' holds the results of an earlier run" in shown


def test_the_number_is_added_to_a_name_that_is_no_plain_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    job = tmp_path / "exp #2.yaml"
    job.write_text(made.read_text().replace(f"out: {tmp_path / 'out'}, ", ""))
    earlier = Path("runs/exp #2")
    earlier.mkdir(parents=True)
    (earlier / "job.yaml").write_text("")
    code, shown = trained(job)
    assert code == 0, shown
    assert sorted(path.name for path in Path("runs").iterdir()) == ["exp #2", "exp #2-2"]
    assert (Path("runs/exp #2-2") / "job.yaml").exists()
