"""Child processes, non-daemon threads and environment variables that a test leaves behind."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

# Variables that pytest sets in each phase of a test, torch's compiler on first use, and Lightning when imported.
EXEMPT_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    *("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_"),
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)


def child_processes() -> set[int]:
    """Return the process ids of this process's living children (none on systems without /proc)."""
    children: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            children.update(int(pid) for pid in listing.read_text().split())
        except OSError:  # the thread has ended
            continue
    return {pid for pid in children if not _is_zombie(pid)}


@dataclass(frozen=True)
class Snapshot:
    """The processes, threads and environment at one moment."""

    children: frozenset[int]
    threads: frozenset[threading.Thread]
    environment: dict[str, str]

    @classmethod
    def take(cls) -> "Snapshot":
        return cls(frozenset(child_processes()), frozenset(_lasting_threads()), _environment())

    def leaks(self, exempt: Callable[[], Collection[int]] = frozenset, grace_s: float = 1.0) -> list[str]:
        """Describe new processes, new threads and changed variables.

        Processes and threads have `grace_s` seconds to end. `exempt` returns the processes that may remain.
        """
        deadline = time.monotonic() + grace_s
        while (new := self._new_processes_and_threads(exempt)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return new + self._changed_variables()

    def restore(self, exempt: Callable[[], Collection[int]] = frozenset) -> None:
        """Kill new processes and restore the environment variables. Threads cannot be killed."""
        for pid in self._new_children(exempt):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in _environment().keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)

    def _new_children(self, exempt: Callable[[], Collection[int]]) -> set[int]:
        return child_processes() - self.children - set(exempt())

    def _new_processes_and_threads(self, exempt: Callable[[], Collection[int]]) -> list[str]:
        processes = [f"process {pid} ({_command(pid)})" for pid in sorted(self._new_children(exempt))]
        return processes + [f"thread {thread.name}" for thread in _lasting_threads() - self.threads]

    def _changed_variables(self) -> list[str]:
        now = _environment()
        names = sorted(now.keys() | self.environment.keys())
        return [
            f"environment variable {name} ({self.environment.get(name)!r} -> {now.get(name)!r})"
            for name in names
            if now.get(name) != self.environment.get(name)
        ]


def _lasting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(EXEMPT_VARIABLES)}


def _is_zombie(pid: int) -> bool:
    try:
        # The state follows the command, which is in parentheses and may hold any character.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended"
