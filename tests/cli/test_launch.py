"""``partita train --processes 2`` in real processes: training, failures, interruption, and no orphans."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from partita.checkpoint.format.folder import complete_checkpoints
from partita.cli import worker
from partita.cli.launch import _show_failure, _variables
from partita.errors import ConfigError, PartitaError
from partita.observe.metrics import METRICS_FILE, read_metrics
from partita.train.job import Job
from tests.cli.processes import (
    finish,
    start,
    start_evaluation,
    start_node,
    start_torchrun,
    wait_for,
    workers_of,
    write_job,
)

# Few log lines: the output pipe is read only at the end, and must not fill.
ENDLESS = ("--set", "train.steps=1000000", "--set", "train.eval_every=1000000", "--set", "train.log_every=50")


def training_has_begun(folder: Path) -> bool:
    path = folder / "out" / METRICS_FILE
    return path.exists() and bool(read_metrics(path)[0])


def test_two_processes_train_and_leave_everything_behind(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    code, out, error = finish(start(job, "--set", "train.steps=20"))
    assert code == 0, error
    train, held_out = read_metrics(tmp_path / "out" / METRICS_FILE)
    assert [row.step for row in held_out] == [0, 20]
    assert held_out[1].held_out_loss < held_out[0].held_out_loss - 1
    assert all(len(row.memory_bytes) == 2 for row in train)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    weights = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert weights["model.embed_tokens.weight"].shape == (256, 32)
    assert out.count("held-out loss") == 2  # printed by one rank only
    assert (tmp_path / "out" / "sample.txt").read_text() in out
    code, out, error = finish(start_evaluation(job))
    assert code == 0, error
    assert out.startswith(f"held-out loss {held_out[1].held_out_loss:.4f} nats per byte, perplexity ")
    assert not workers_of(job)


@pytest.mark.thorough
def test_a_model_is_split_over_two_processes_from_the_job_alone(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    split = ("--set", "engine.parallel.tensor=2", "--set", "train.steps=20")
    code, out, error = finish(start(job, *split, "--explain"))
    assert code == 0, error
    assert re.search(r"blocks\.0\.attention +1\+1 of 2 query heads over 2 key heads \(class Attention\)", out)
    assert not (tmp_path / "out" / METRICS_FILE).exists()
    code, out, error = finish(start(job, *split))
    assert code == 0, error
    _, held_out = read_metrics(tmp_path / "out" / METRICS_FILE)
    assert held_out[1].held_out_loss < held_out[0].held_out_loss - 1
    assert "0.03M parameters" in out
    assert load_file(tmp_path / "out" / "model" / "model.safetensors")["model.embed_tokens.weight"].shape == (256, 32)


def test_ctrl_c_ends_all_ranks_after_one_step_with_their_weights(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start(job, *ENDLESS)
    wait_for(lambda: training_has_begun(tmp_path) or process.poll() is not None, "the first row of metrics")
    process.send_signal(signal.SIGINT)
    code, out, error = finish(process)
    assert code == 130, error
    assert "stopped by a signal after" in out
    assert error == ""
    train, _ = read_metrics(tmp_path / "out" / METRICS_FILE)
    assert f"after step {train[-1].step};" in out
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert (tmp_path / "out" / "loss.png").exists()
    assert not workers_of(job)


def test_a_rank_that_is_killed_is_named_and_the_others_end(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start(job, *ENDLESS)
    wait_for(lambda: training_has_begun(tmp_path) or process.poll() is not None, "the first row of metrics")
    victim = workers_of(job)[1]
    os.kill(victim, signal.SIGKILL)
    code, _, error = finish(process)
    assert code == 1
    assert f"error: rank 1 (process {victim}) was ended by SIGKILL" in error
    assert not workers_of(job)


def saving(folder: Path) -> tuple[str, ...]:
    return ("--set", f"engine.checkpoint.dir={folder / 'saved'}", "--set", "engine.checkpoint.every_steps=10")


@pytest.mark.thorough
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start(job, *ENDLESS, *saving(tmp_path))
    wait_for(lambda: training_has_begun(tmp_path) or process.poll() is not None, "the first row of metrics")
    process.send_signal(signal.SIGTERM)
    code, out, error = finish(process)
    assert code == 128 + signal.SIGTERM, error
    last = max(complete_checkpoints(tmp_path / "saved"))
    assert f"stopped by a signal after step {last};" in out
    code, out, error = finish(start(job, "--set", f"train.steps={last + 7}", *saving(tmp_path)))
    assert code == 0, error
    assert f"of step {last} from" in out
    assert max(complete_checkpoints(tmp_path / "saved")) == last + 7
    assert not workers_of(job)


def test_a_run_that_is_asked_for_a_checkpoint_saves_and_goes_on(tmp_path: Path) -> None:
    job, saved = write_job(tmp_path), tmp_path / "saved"
    process = start(job, *ENDLESS, "--set", f"engine.checkpoint.dir={saved}")
    try:
        wait_for(lambda: training_has_begun(tmp_path) or process.poll() is not None, "the first row of metrics")
        for number in (1, 2):
            process.send_signal(signal.SIGUSR1)
            wait_for(lambda number=number: len(complete_checkpoints(saved)) == number, "a checkpoint")  # type: ignore[misc]
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        code, _, error = finish(process)
    assert code == 128 + signal.SIGTERM, error


@pytest.mark.thorough
def test_torchrun_starts_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start_torchrun(job, "--set", "train.steps=200", *saving(tmp_path))
    wait_for(lambda: complete_checkpoints(tmp_path / "saved") or process.poll() is not None, "the first checkpoint")
    os.kill(workers_of(job)[1], signal.SIGKILL)
    code, out, error = finish(process)
    assert code == 0, error
    assert "restored model, optimizer, scheduler and random states of step " in out
    train, _ = read_metrics(tmp_path / "out" / METRICS_FILE)
    assert [row.step for row in train] == list(range(5, 201, 5))
    assert max(complete_checkpoints(tmp_path / "saved")) == 200


@pytest.mark.thorough
def test_nodes_come_and_go(tmp_path: Path) -> None:
    """When a node joins or leaves, the run resumes from its newest checkpoint on the current number of ranks."""
    job, store = write_job(tmp_path), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = ("--set", "train.steps=100000", *saving(tmp_path))

    def newest() -> int:
        return max(complete_checkpoints(tmp_path / "saved"), default=0)

    nodes = [start_node(job, store.port, *arguments)]
    try:
        wait_for(lambda: newest() or nodes[0].poll() is not None, "the first checkpoint")
        (first,) = workers_of(job).values()
        nodes.append(start_node(job, store.port, *arguments))
        wait_for(lambda: len(workers_of(job)) == 2 and first not in workers_of(job).values(), "the second node")
        both = newest()
        wait_for(lambda: newest() > both + 20, "a checkpoint of two ranks")
        lost = [pid for pid in workers_of(job).values() if parent_of(pid) == nodes[1].pid]
        kill(nodes[1].pid, *lost)
        nodes[1].communicate()
        wait_for(lambda: len(workers_of(job)) == 1, "the end of the second node")
        alone = newest()
        wait_for(lambda: newest() > alone + 20, "a checkpoint of one rank again")
        nodes[0].send_signal(signal.SIGTERM)
        _, out, error = finish(nodes[0])
    finally:
        kill(*(node.pid for node in nodes), *workers_of(job).values())
    sizes = re.findall(r"^mesh: (\d) ranks", out, re.MULTILINE)
    # torchrun may restart once more on the same number of ranks if it notices late that a node is gone.
    assert [size for size, _ in groupby(sizes)] == ["1", "2", "1"], error
    assert out.count("restored model, optimizer, scheduler and random states of step ") == len(sizes) - 1


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends orphans on Linux only")
def test_workers_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    process = start(job, *ENDLESS)
    wait_for(lambda: training_has_begun(tmp_path) or process.poll() is not None, "the first row of metrics")
    assert workers_of(job)
    process.kill()
    process.communicate()
    wait_for(lambda: not workers_of(job), "the end of the workers", 20)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("wrong key"), 2, "error: rank 1: wrong key"),
        (PartitaError("rank 1: a collective failed"), 1, "error: rank 1: a collective failed"),
        (ValueError("a defect"), 1, "error: rank 1 (process 7) failed: ValueError: a defect"),
    ],
)
def test_a_worker_writes_its_error_down_and_the_launcher_tells_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    message: str,
) -> None:
    def train(job: Job, console: Console) -> None:
        raise error

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(worker, "train", train)
    assert worker.main([str(write_job(tmp_path)), "train.steps=3"]) == code
    assert capsys.readouterr() == ("", "")
    failures = {1: ProcessFailure(local_rank=1, pid=7, exitcode=code, error_file=str(file))}
    shown = told(failures, capsys)
    assert shown[0] == code
    assert message in shown[1]
    assert ("Traceback" in shown[1]) is (type(error) is ValueError)


def failure(folder: Path, rank: int, exitcode: int, error: Exception | None = None) -> ProcessFailure:
    """Return a failure as the agent reports it. Recorded errors have times in the order of their ranks."""
    file = folder / f"error-{rank}.json"
    if error is not None:
        details = {"py_callstack": f"Traceback of rank {rank}", "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {error}", "extraInfo": details}
        file.write_text(json.dumps({"message": message}))
        os.utime(file, (1000 + rank, 1000 + rank))
    return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file=str(file))


def told(failures: dict[int, ProcessFailure], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = _show_failure(failures, Console())
    return code, capsys.readouterr().out


def test_the_first_failure_is_told_with_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = {3: failure(tmp_path, 3, 1, KeyError("late")), 2: failure(tmp_path, 2, 1, ValueError("[early]"))}
    code, text = told(failures, capsys)
    assert code == 1
    assert "Traceback of rank 2" in text
    assert "error: rank 2 (process 102) failed: ValueError: [early]" in text
    assert "late" not in text


def test_a_killed_rank_is_the_cause_of_the_errors_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = {0: failure(tmp_path, 0, 1, RuntimeError("connection closed")), 1: failure(tmp_path, 1, -9)}
    code, text = told(failures, capsys)
    assert code == 1
    assert "rank 1 (process 101) was ended by SIGKILL; the system does this when memory runs out" in text


def test_a_rank_that_the_agent_ended_is_not_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failures = {0: failure(tmp_path, 0, -15), 1: failure(tmp_path, 1, 2, ValueError("wrong: key"))}
    code, text = told(failures, capsys)
    assert (code, text) == (2, "error: rank 1: wrong: key\n")


def test_a_rank_that_was_ended_after_its_error_failed_by_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that recorded an error first is the cause, even if it was terminated because it took long to exit."""
    failures = {0: failure(tmp_path, 0, -15, ValueError("the user's")), 1: failure(tmp_path, 1, 1, KeyError("late"))}
    code, text = told(failures, capsys)
    assert code == 1
    assert "Traceback of rank 0" in text
    assert "error: rank 0 (process 100) failed: ValueError: the user's" in text
    failures[0] = failure(tmp_path, 0, -15, ConfigError("config: wrong"))
    assert told(failures, capsys) == (2, "error: rank 0: config: wrong\n")
    failures[0] = failure(tmp_path, 0, -15, PartitaError("it ended"))
    assert told(failures, capsys) == (1, "error: rank 0: it ended\n")


def test_an_error_that_names_another_ranks_is_not_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that reports another rank's error is not the cause, even if it was recorded first.

    The other rank closes its connections before its error reaches the launcher.
    """
    follows = PartitaError(
        "rank 0: receiving of pipeline over pipeline failed: rank 1 ended with ValueError: the user's"
    )
    failures = {0: failure(tmp_path, 0, 1, follows), 1: failure(tmp_path, 1, 1, ValueError("the user's"))}
    os.utime(tmp_path / "error-1.json", (time.time() + 1, time.time() + 1))
    assert "error: rank 1 (process 101) failed: ValueError: the user's" in told(failures, capsys)[1]


def test_a_closed_connection_is_not_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    failures = {0: failure(tmp_path, 0, 1, closed), 1: failure(tmp_path, 1, 1, PartitaError("out of memory"))}
    assert told(failures, capsys) == (1, "error: rank 1: out of memory\n")


def test_an_error_is_the_cause_also_where_its_file_is_newer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recorded error is the cause, even if its file is newer than the agent's times, which are whole seconds."""
    failures = {0: failure(tmp_path, 0, -15), 1: failure(tmp_path, 1, 1, ValueError("the user's"))}
    os.utime(tmp_path / "error-1.json", (time.time() + 1, time.time() + 1))
    assert "error: rank 1 (process 101) failed: ValueError: the user's" in told(failures, capsys)[1]


def test_a_failure_without_a_word_has_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = told({1: failure(tmp_path, 1, 7)}, capsys)
    assert code == 1
    assert "rank 1 (process 101) failed: exit code 7" in text


def test_cores_are_divided_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("partita.cli.launch.usable_cores", lambda: 8)
    assert [_variables(num)["OMP_NUM_THREADS"] for num in (2, 3, 16)] == ["4", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _variables(2)["OMP_NUM_THREADS"] == "5"
