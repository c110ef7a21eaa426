"""Run the command as a user does, in a separate process, and find its workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src"

TINY_JOB = """
model: {layers: 1, width: 32, heads: 2}
data: {sequence: 16, held_out: 0.1}
train: {steps: 30, eval_every: 30, eval_batches: 2, log_every: 5, sample: {tokens: 5}}
engine:
  zero: {stage: 3}
  batch: {total: 8}
  optimizer: {lr: 1.0e-2}
"""


def write_job(folder: Path) -> Path:
    """Write a job of a few seconds into ``folder``, and return its path. Its results go to ``folder/out``."""
    text, job = folder / "text.txt", folder / "job.yaml"
    text.write_bytes(b"to be or not to be, that is the question. " * 400)
    settings = TINY_JOB.replace("data: {", f"data: {{corpus: {text}, ").replace(
        "steps:", f"out: {folder / 'out'}, steps:"
    )
    job.write_text(settings)
    return job


def start(job: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``partita train`` on a job with two processes. Temporary files go next to the job: a kill leaves some."""
    return _start(job, [sys.executable, "-m", "partita.cli.main", "train", str(job), "--processes", "2", *arguments])


def start_evaluation(job: Path) -> subprocess.Popen[str]:
    """Start ``partita eval`` on the results of a job with two processes."""
    return _start(job, [sys.executable, "-m", "partita.cli.main", "eval", str(job), "--processes", "2"])


def start_torchrun(job: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start ``partita train`` with torchrun, which restarts the two processes once if one fails."""
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m partita.cli.main train"
    return _start(job, [sys.executable, "-m", *torchrun.split(), str(job), *arguments])


def start_node(job: Path, port: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a node of an elastic run of one or two nodes, with one process each; their store is at ``port``.

    By default, torch 2.13 keeps a store between rounds, which a node that joins later never learns of.
    """
    conf = "last_call_timeout=2,is_host=0"
    settings = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-conf {conf}"
    torchrun = f"torch.distributed.run {settings} --rdzv-endpoint localhost:{port} -m partita.cli.main train"
    command = [sys.executable, "-m", *torchrun.split(), str(job), *arguments]
    return _start(job, command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def _start(job: Path, command: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(SOURCES), "TMPDIR": str(job.parent)} | variables,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> tuple[int, str, str]:
    """Return the exit code, standard output and standard error. Kill the process if it takes longer."""
    try:
        out, error = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, error


def workers_of(job: Path) -> dict[int, int]:
    """Return the process ids, by rank, of the living workers of a job (a path in a test's own folder)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if not {b"partita.cli.worker", b"partita.cli.main"} & set(command) or str(job).encode() not in command:
                continue
            variables = dict(line.partition(b"=")[::2] for line in (folder / "environ").read_bytes().split(b"\0"))
            found[int(variables[b"RANK"])] = int(folder.name)
        except (OSError, KeyError):  # the process has just ended
            continue
    return found


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {timeout_s:g} s"
        time.sleep(0.05)
