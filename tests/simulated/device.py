"""Build the simulated accelerator and register it with PyTorch as the process's only accelerator."""

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import os
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

NAME, BACKEND = "sim", "simcl"
HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "simulated"


def build() -> Path:
    """Return the extension module's file; compile it (about a minute) if none exists for this torch and these sources.

    Raises:
        subprocess.CalledProcessError: the compiler's errors are on standard error.
    """
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.[ch]pp")))
    digest = hashlib.sha256(sources + torch.__version__.encode()).hexdigest()[:16]
    built = CACHE / f"{NAME}-{digest}.so"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            partial = built.with_suffix(".partial")
            includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            libraries = [*cpp_extension.library_paths()]
            command = ["c++", "-O1", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}_native"]
            command += [f"-isystem{folder}" for folder in includes]
            command += [str(HERE / "device.cpp"), "-o", str(partial)]
            command += [f"-L{folder}" for folder in libraries] + ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
            subprocess.run(command, check=True)
            partial.rename(built)
    return built


@functools.cache
def register() -> Any:
    """Register the device with this rank's number and its process groups; return the extension module.

    The module's ``races()`` are the races found so far. ``memory()`` returns the allocated bytes, their peak and their
    limit; ``set_limit`` changes the limit, and ``set_pin_limit`` the bytes of host memory that can be pinned at once.
    """
    torch.utils.rename_privateuse1_backend(NAME)
    loader = importlib.machinery.ExtensionFileLoader(f"{NAME}_native", str(build()))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    native.use(index)
    torch._register_device_module(NAME, _module(native, num_devices=index + 1))
    torch.utils.generate_methods_for_privateuse1_backend()
    from tests.simulated.group import Group  # its import needs the registered device

    dist.Backend.register_backend(BACKEND, functools.partial(Group, native), devices=[NAME])
    _tell_threads_apart(native)
    return native


def _tell_threads_apart(native: Any) -> None:
    """Give each of partita's threads its own clock; all other threads of the process share one.

    A job starts with the knowledge of the thread that submitted it, and a thread that waits for a job gains the job's
    knowledge.
    """
    from partita.memory import streams  # imported late: mutation tests change its source first

    numbers, own = itertools.count(2), threading.local()

    class Job(streams._Job):
        def __init__(self, pieces: Iterable[streams.Piece], workers: streams.Workers) -> None:
            super().__init__(map(self._ordered, pieces), workers)
            self._known_before, self._known_after = [native.host_clock()], list[dict[int, int]]()
            self._predecessors = list[Job]()

        def _ordered(self, piece: streams.Piece) -> streams.Piece:
            def run() -> None:
                if not hasattr(own, "number"):
                    own.number = -next(numbers)
                    native.enter_thread(own.number)
                self._known_before += (known for job in self._predecessors for known in job._known_after)
                self._predecessors.clear()  # predecessors may hold references to memory
                for known in self._known_before:
                    native.host_learns(known)
                try:
                    piece()
                finally:
                    self._known_after.append(native.host_clock())

            return run

        def then(self, call: Callable[[Exception | None], object]) -> None:
            if isinstance(following := getattr(call, "__self__", None), Job):
                following._predecessors.append(self)
            super().then(call)

        def ends_within(self, seconds: float) -> bool:
            is_done = super().ends_within(seconds)
            self._learn(is_done)
            return is_done

        def wait(self) -> None:
            try:
                super().wait()
            finally:
                self._learn(True)

        def _learn(self, is_done: bool) -> None:
            for known in self._known_after if is_done else ():
                native.host_learns(known)

    streams._Job = Job  # type: ignore[misc]


def _module(native: Any, num_devices: int) -> ModuleType:
    """Return the device's counterpart of ``torch.cuda``. Random numbers are drawn from the host's generator."""
    module = ModuleType(f"torch.{NAME}")
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: num_devices,  # torch.accelerator.device_count calls it
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: None,
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda device=None: SimpleNamespace(
            name=NAME, total_memory=native.memory()[2], uuid=os.environ.get("SIM_UUID", os.environ.get("RANK", "0"))
        ),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "mem_get_info": lambda device=None: (native.memory()[2] - native.memory()[0], native.memory()[2]),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: native.memory()[0],
        "max_memory_allocated": lambda device=None: native.memory()[1],
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(),
        "cudart": lambda: _Runtime(native),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


class _Runtime:
    """The functions of CUDA's runtime that pin existing memory."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        return int(self._native.pin(address, num_bytes))

    def cudaGetErrorString(self, status: int) -> str:  # noqa: N802
        return f"error {status}"

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._native.unpin(address)
        return 0
