"""Runs the command as a user does: as a process of its own, whose descendants can be looked for afterwards."""

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
    """A job of a few seconds in ``folder``; its results go to ``folder/out``."""
    text, job = folder / "text.txt", folder / "job.yaml"
    text.write_bytes(b"to be or not to be, that is the question. " * 400)
    settings = TINY_JOB.replace("data: {", f"data: {{corpus: {text}, ").replace(
        "steps:", f"out: {folder / 'out'}, steps:"
    )
    job.write_text(settings)
    return job


def start(job: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts ``partita train`` on a job, with two processes. Temporary files go beside the job: a kill leaves some."""
    return _start(job, [sys.executable, "-m", "partita.cli.main", "train", str(job), "--processes", "2", *arguments])


def start_evaluation(job: Path) -> subprocess.Popen[str]:
    """Starts ``partita eval`` on the results of a job, with two processes."""
    return _start(job, [sys.executable, "-m", "partita.cli.main", "eval", str(job), "--processes", "2"])


def start_torchrun(job: Path, *arguments: str) -> subprocess.Popen[str]:
    """The same by torchrun, which starts the processes again once if one fails."""
    torchrun = "torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m partita.cli.main train"
    return _start(job, [sys.executable, "-m", *torchrun.split(), str(job), *arguments])


def start_node(job: Path, port: int, *arguments: str) -> subprocess.Popen[str]:
    """One of one or two nodes, with a process each, that may come and go; they meet in the store at ``port``.

    (torch 2.13 keeps a store from round to round that a node which joins later never learns of, unless told not to.)
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


def finish(process: subprocess.Popen[str], timeout_s: float = 90) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; the process is ended where it takes longer."""
    try:
        out, error = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, error


def workers_of(job: Path) -> dict[int, int]:
    """Process ids by rank of the workers of a job (a path of a test's own folder) that are alive."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if not {b"partita.cli.worker", b"partita.cli.main"} & set(command) or str(job).encode() not in command:
                continue
            variables = dict(line.partition(b"=")[::2] for line in (folder / "environ").read_bytes().split(b"\0"))
            found[int(variables[b"RANK"])] = int(folder.name)
        except (OSError, KeyError):  # it has just ended
            continue
    return found


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about in {timeout_s:g} s"
        time.sleep(0.05)
