"""The run whose results partita eval and partita sample load."""

from pathlib import Path

import pytest

from partita.errors import ConfigError
from partita.train.job import load_job
from partita.train.results import JOB_FILE, WEIGHTS
from partita.train.trained import load_trained
from tests.cli.processes import write_job


def results(job: Path, folder: Path, seed: int) -> Path:
    """Write the results of a run of a job, without weights, and return the folder."""
    (folder / WEIGHTS).mkdir(parents=True)
    (folder / JOB_FILE).write_text(job.read_text().replace("model: {", f"model: {{seed: {seed}, "))
    return folder


def test_an_override_chooses_the_run_of_a_job_file(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    first = results(job, load_job(job).out, 1)
    second = results(job, tmp_path / "second", 2)
    found = [load_trained(job), load_trained(job, [f"train.out={second}"]), load_trained(first)]
    assert [(loaded.out, loaded.model.seed) for loaded in found] == [(first, 1), (second, 2), (first, 1)]
    with pytest.raises(ConfigError, match="'nowhere' has no results of a run"):
        load_trained(job, ["train.out=nowhere"])


@pytest.mark.parametrize("name", ["exp #2", "7", "2024_01", "0x10", "yes", "a: b", "[x]", 'say "hi"', "läuft 🙂"])
def test_the_name_of_a_folder_is_not_read_as_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    job = write_job(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load_trained(results(job, Path(name), 1)).out == Path(name)
