"""The command in this process: its errors and warnings, and the output of doctor."""

import errno
import gzip
import importlib.util
import io
import json
import os
import re
import socket
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from partita.cli import doctor, machine
from partita.cli.console import busy, replace_unprintable, show_warnings_in_one_line
from partita.cli.main import app
from partita.observe.metrics import METRICS_FILE, read_metrics
from partita.train import loop
from tests.cli.processes import write_job


def invoke(*arguments: str | Path) -> tuple[int, str]:
    """Run the command, and return its exit code, and its output with errors, in unwrapped lines."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300", "TERM": "dumb"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "train.stepz=3"], "train.stepz: unknown key; did you mean train.steps?"),
        (["--set", "train.steps"], "expected 'section.key=value'"),
        (["--set", "engine.zero.stage=4"], "zero.stage: expected one of 0, 1, 2, 3"),
        (["--set", "engine.batch.total=9", "--processes", "2"], "batch.total 9 cannot be divided by"),
        (["--set", "engine.parallel.data=3", "--processes", "2"], "but there are 2"),
        (
            ["--set", "engine.communication.gradients=fp8", "--processes", "2"],
            "communication.gradients: expected one of",
        ),
        (["--set", "train.out=/proc/here"], "train.out: cannot make the folder '/proc/here'"),
        (["--set", "data.corpus=nowhere"], "data.corpus: no file or folder 'nowhere'"),
        (["--set", "model.heads=5"], "model.width: 32 over model.heads 5"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, output = invoke("train", write_job(tmp_path), *arguments)
    assert code == 2
    assert output.startswith("error: ")
    assert message in output
    assert "Traceback" not in output


def test_a_job_that_does_not_exist_is_named() -> None:
    code, output = invoke("train", "nowhere.yaml")
    assert code == 2
    assert "'nowhere.yaml' does not exist" in output


def test_processes_are_not_started_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    code, output = invoke("train", write_job(tmp_path), "--processes", "2")
    assert code == 2
    assert "a launcher has already started this process as one of 4; leave --processes out" in output


def test_limits_of_the_system_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = invoke("plan", "x" * 300)
    assert (code, len(output.splitlines())) == (1, 1)
    assert output.startswith("error: File name too long")
    assert output.endswith("choose a shorter name\n")

    def no_files(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("partita.cli.launch.elastic_launch", lambda *_: no_files)
    code, output = invoke("train", write_job(tmp_path), "--processes", "2")
    assert (code, output) == (1, "error: Too many open files; raise this process's limit of open files (ulimit -n)\n")


def test_a_lack_of_memory_in_a_batch_is_explained(tmp_path: Path) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    with mock.patch("partita.engine.engine.MicroBatches.train", side_effect=error):
        code, output = invoke("train", write_job(tmp_path), "--processes", "1", "--set", "engine.batch.micro=4")
    assert code == 1
    assert "error: out of memory in train_batch, on rank 0 (cpu): CUDA out of memory" in output
    assert "use a smaller model or micro-batch, or more ranks" in output
    assert "Traceback" not in output


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    settings = [f"engine.checkpoint.dir={tmp_path / 'saved'}", "engine.checkpoint.every_steps=1", "train.steps=2"]
    with mock.patch("partita.checkpoint.format.file.os.pwrite", side_effect=full):
        code, output = invoke("train", write_job(tmp_path), "--processes", "1", *(f"--set={each}" for each in settings))
    assert code == 1
    assert output.count("No space left on device") == 1
    assert ".py:" not in output


def test_a_spinner_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        out = io.StringIO()
        terminal = Console(file=out, force_terminal=is_terminal, width=80)
        monkeypatch.setattr("partita.cli.console.Console", lambda stderr, terminal=terminal: terminal)
        with busy("predicting plans for llama-3-8b"):
            pass
        assert ("predicting plans for llama-3-8b" in out.getvalue()) is is_terminal
        assert out.getvalue() == "" or is_terminal


def test_warnings_of_the_library_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # so that monkeypatch restores it
    show_warnings_in_one_line()
    assert warnings.formatwarning("step 3: skipped", UserWarning, loop.__file__, 12) == "warning: step 3: skipped\n"
    script = warnings.formatwarning("of the script", UserWarning, "train.py", 7, "x = 1")
    assert script == "train.py:7: UserWarning: of the script\n  x = 1\n"


def test_what_the_output_cannot_show_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    replace_unprintable()
    typer.echo("a\ufffdb")
    sys.stdout.flush()
    assert written.getvalue() == b"a?b\n"


def test_an_unknown_option_or_command_is_refused() -> None:
    for arguments in (("train", "job.yaml", "--proceses", "2"), ("tarin",)):
        code, output = invoke(*arguments)
        assert code == 2
        assert f"No such {'option' if len(arguments) > 1 else 'command'}" in output


def test_one_process_trains_in_place(tmp_path: Path) -> None:
    code, output = invoke("train", write_job(tmp_path), "--processes", "1", "--set", "train.steps=2")
    assert code == 0
    assert "done after step 2" in output
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


def test_a_run_is_evaluated_and_continues_a_prompt(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    code, output = invoke("eval", job)
    assert code == 2
    assert f"'{tmp_path / 'out'}' has no results of a run" in output
    assert invoke("train", job, "--processes", "1", "--set", "train.steps=2")[0] == 0
    _, (*_, last) = read_metrics(tmp_path / "out" / METRICS_FILE)
    for run in (job, tmp_path / "out"):
        code, output = invoke("eval", run)
        assert code == 0
        assert f"held-out loss {last.held_out_loss:.4f} nats per byte, perplexity {last.perplexity:.4f}, " in output
        assert "over 256 bytes" in output  # two batches of 8 samples of 16 bytes
    assert "over 128 bytes" in invoke("eval", job, "--set", "train.eval_batches=1")[1]
    code, output = invoke("sample", tmp_path / "out", "to be", "--tokens", "4", "--temperature", "0")
    assert code == 0
    assert output.startswith("to be")
    assert len(output.rstrip("\n").encode()) >= 9
    assert invoke("sample", tmp_path, "to be")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "prompt: expected non-empty text; got ''"),
        (["a", "--temperature", "inf"], "--temperature: expected a number of at least 0; got inf"),
        (["a", "--tokens", str(2**31)], f"--tokens: expected a whole number .*at most {2**31 - 1}; got {2**31}"),
        (["a", "--seed", str(2**31)], f"--seed: expected a whole number .*at most {2**31 - 1}; got {2**31}"),
        (["", "--seed", str(2**31)], "prompt: .*; got ''; --seed: expected .*"),
    ],
)
def test_values_of_a_sample_that_are_not_valid_are_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, output = invoke("sample", tmp_path, *arguments)
    assert code == 2
    assert re.fullmatch(f"error: {message}\n", output)


def test_a_profile_has_the_predicted_step_beside_the_measured_ones(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    asked = ["train", job, "--processes", "1", "--set", "train.steps=6", "--set", "model.layers=2", "--machine", "h100"]
    code, output = invoke(*asked, "--profile")
    assert code == 0, output
    events = json.loads(gzip.decompress((tmp_path / "out" / "trace-0.json.gz").read_bytes()))["traceEvents"]
    titles = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    own, predicted = (
        [e for e in events if e["pid"] == titles[name] and e["ph"] == "X"]
        for name in ("partita, rank 0", "predicted, h100")
    )
    assert {"forward", "backward", "update"} <= {event["cat"] for event in predicted}
    assert min(e["ts"] for e in predicted) == pytest.approx(min(e["ts"] for e in own), abs=1), "from where it begins"
    code, output = invoke(*asked, "--overwrite")
    assert (code, "add --profile" in output) == (2, True)


def test_help_and_version() -> None:
    code, output = invoke("--help")
    assert code == 0
    assert {"train", "doctor"} <= set(output.split())


def test_doctor_shows_the_machine_and_the_choices() -> None:
    code, output = invoke("doctor")
    assert code == 0
    for word in (torch.__version__, "gloo yes", "cores", "memory", "disk", "compute dtype", "compiled kernels"):
        assert word in output
    wanted = "bf16" if torch.cuda.is_available() else "fp32"
    assert f"{wanted} (precision.compute: auto)" in output


def test_doctor_for_a_report_is_a_table_that_names_nobody() -> None:
    code, output = invoke("doctor", "--markdown")
    assert code == 0
    head, line, *rows = output.splitlines()
    assert (head, line) == ("| | |", "|---|---|")
    assert all(re.fullmatch(r"\| [\w ]+ \| .+ \|", row) for row in rows)
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert names[:3] == ["partita", "Python", "PyTorch"]
    assert {"libraries", "devices", "compute dtype", "compiled kernels"} <= set(names)
    for private in (socket.gethostname(), str(Path.home()), str(Path.cwd())):
        assert private not in output


def test_a_markdown_cell_holds_its_text() -> None:
    assert doctor.markdown_table([("a", "b|c\nd")]).splitlines()[2] == r"| a | b\|c<br>d |"


def test_doctor_says_what_is_missing_and_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    rows = dict(doctor.choice_rows())
    assert rows["transformers"] == "not installed: no Hugging Face models in a job"
    assert rows["tensorboard"] == "not installed: no event files, only metrics.jsonl"
    assert rows["compiled kernels"] == "not built; plain PyTorch is used"


def test_a_machine_goes_into_a_file_that_plans_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_machine", lambda *_: pytest.fail("it was measured for nothing"))
    code, output = invoke("machine", "--out", tmp_path / "mine.txt")
    assert code == 2
    assert "mine.txt: expected a name that ends in .yaml" in output
