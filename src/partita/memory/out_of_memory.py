"""The out-of-memory report: the bytes of each state, and the config changes that would help most."""

import errno
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from partita.errors import PartitaError
from partita.layout.blueprint import Blueprint
from partita.layout.remedies import find_remedies
from partita.memory import accelerator
from partita.memory.ledger import Ledger, process_memory
from partita.table.residence import Tier

P = ParamSpec("P")
R = TypeVar("R")
# Texts of RuntimeErrors: of torch's allocator for the host, of C++ libraries, of the accelerator's driver and cuBLAS.
MESSAGES = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    "std::bad_alloc",
    "Cannot allocate memory",
    "could not create a memory object",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class OutOfMemoryReporter:
    """Adds the out-of-memory report to the errors of one engine. ``rank`` appears in messages."""

    def __init__(self, blueprint: Blueprint, ledger: Ledger, device: torch.device, rank: int) -> None:
        self._blueprint = blueprint
        self._ledger = ledger
        self._device = device
        self._rank = rank
        self._process_bytes = process_memory()[0]

    @contextmanager
    def report_out_of_memory(self, where: str) -> Iterator[None]:
        """Convert out-of-memory errors inside the block into a PartitaError with the breakdown and remedies."""
        try:
            yield
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise PartitaError(self._explain(where, error)) from error

    def _explain(self, where: str, error: BaseException) -> str:
        on_device = isinstance(error, torch.OutOfMemoryError)
        short = {Tier.DEVICE if on_device else Tier.HOST}
        if accelerator.is_host(self._device):
            short = {Tier.DEVICE, Tier.HOST}
        report = self._ledger.report(self._device)
        states = sum(num for (_, tier), num in report.peak.items() if Tier(tier) in short)
        peak = report.device_peak_bytes if on_device else report.process_peak_bytes - self._process_bytes
        remedies = find_remedies(self._blueprint, short, max(0, peak - states))
        message = (str(error) or type(error).__name__).splitlines()[0]
        lines = [f"out of memory in {where}, on rank {self._rank} ({self._device}): {message}", str(report)]
        if remedies:
            lines.append("What would help most:")
            lines += [f"  {place}. {remedy}" for place, remedy in enumerate(remedies, 1)]
        else:
            lines.append("No setting frees memory here: use a smaller model or micro-batch, or more ranks")
        return "\n".join(lines)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error, on the device or on the host."""
    if isinstance(error, PartitaError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)


class _Explains(Protocol):
    _oom_reporter: OutOfMemoryReporter


S = TypeVar("S", bound=_Explains)


def report_out_of_memory(where: str) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorate a method, so that the ``_oom_reporter`` of its object explains its out-of-memory errors."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Any:
            with self._oom_reporter.report_out_of_memory(where):
                return method(self, *args, **kwargs)

        return wrapped

    return decorate
