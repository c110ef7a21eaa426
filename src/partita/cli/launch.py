"""Launcher of the processes on one machine: starts them, waits for them, and reports a failure in one message.

torchrun's agent starts them: each has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, runs in its own
session, and gets a Ctrl-C from the agent. When one fails, the others are terminated. SIGUSR1, which requests a
checkpoint, is forwarded to all of them.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from partita.cli.console import FAILURE, USER_ERROR, prefixed, show_error
from partita.comm.watchdog import follows_from_another_rank
from partita.errors import ConfigError, PartitaError
from partita.memory.capacity import usable_cores

# Time after Ctrl-C in which the processes may finish their step and write the weights, before they are killed.
SHUTDOWN_TIMEOUT_S = 600
# Types of recorded errors that are shown without a traceback.
_USER_ERRORS = (PartitaError.__name__, ConfigError.__name__)


def launch(num_processes: int, module: str, arguments: Sequence[str], console: Console) -> int:
    """Run ``python -m module`` with these arguments in ``num_processes`` processes; return the exit code.

    The exit code is 0; 2 for a wrong configuration; 1 for another failure of a process; 128 + the number of the signal
    that ended the run (130 for Ctrl-C).
    """
    _silence_agent()
    with (
        tempfile.TemporaryDirectory(prefix="partita-") as folder,
        _environment(_variables(num_processes)),
        _forwarded(signal.SIGUSR1),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_processes,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except SignalException as interruption:
            return 128 + int(interruption.sigval)
        except ChildFailedError as error:
            return _show_failure(error.failures, console)
    return 0


def _silence_agent() -> None:
    """Silence the agent's failure report, which :func:`launch` replaces. Each of its modules has its own logger."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _variables(num_processes: int) -> dict[str, str]:
    """Return environment variables that the processes get in addition to those of this process.

    They divide the cores between the processes, because each would use all cores by default.
    """
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes))),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_TIMEOUT_S),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",  # set by the agent; listed here so that it is restored
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _forwarded(number: int) -> Iterator[None]:
    """Forward a signal to the started processes inside the block, instead of handling it in this one."""

    def forward(number: int, frame: FrameType | None) -> None:
        for pid in _started():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = signal.signal(number, forward)
    try:
        yield
    finally:
        # Python cannot restore a handler that was not installed from Python (None).
        signal.signal(number, signal.SIG_DFL if before is None else before)


def _started() -> Iterator[int]:
    """Yield the children of this process that are session leaders (Linux only)."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            with suppress(ProcessLookupError):
                if os.getsid(pid) == pid:
                    yield pid


def _show_failure(failures: Mapping[int, ProcessFailure], console: Console) -> int:
    rank, failure = min(failures.items(), key=_when)
    message, trace = _recorded(failure)
    if failure.exitcode < 0 and not message:
        name = signal.Signals(-failure.exitcode).name
        hint = "; the system does this when memory runs out" if name == "SIGKILL" else ""
        show_error(console, f"rank {rank} (process {failure.pid}) was ended by {name}{hint}, and the other ranks, too")
        return FAILURE
    kind, _, text = message.partition(": ")
    if message and (failure.exitcode == USER_ERROR or kind in _USER_ERRORS):
        show_error(console, prefixed(f"rank {rank}: ", text))
        return USER_ERROR if failure.exitcode == USER_ERROR or kind == ConfigError.__name__ else FAILURE
    if trace:
        console.print(Text(trace), soft_wrap=True)
    reason = message.strip(": ") or f"exit code {failure.exitcode}"
    show_error(console, f"rank {rank} (process {failure.pid}) failed: {reason} (the other ranks were ended)")
    return FAILURE


def _when(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
    """Return the sort key of a failure, which puts the original cause first.

    The order: a rank that was killed by a signal, because it makes others fail; the earliest error; errors that are
    caused by another rank's error, which may be recorded earlier; ranks that the launcher terminated. A rank that had
    recorded an error before it was terminated counts as failed by that error.
    """
    failure = item[1]
    file = Path(failure.error_file)
    if file.exists():
        return (2 if follows_from_another_rank(_recorded(failure)[0]) else 1), file.stat().st_mtime
    killed, ended = failure.exitcode < 0, failure.exitcode == -signal.SIGTERM
    return (3 if ended else 0 if killed else 1), float(failure.timestamp)


def _recorded(failure: ProcessFailure) -> tuple[str, str]:
    """Return the error that the process recorded before it ended: ``ErrorType: message``, and the traceback."""
    data = failure.error_file_data.get("message")
    if not isinstance(data, dict):
        return "", ""
    return str(data["message"]), str(data["extraInfo"]["py_callstack"])
