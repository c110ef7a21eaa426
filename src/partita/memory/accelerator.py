"""Accelerators: devices with streams and their own memory. Only this file distinguishes device types.

CUDA, ROCm (``cuda`` in PyTorch), XPU and others are used through PyTorch's common interface: ``torch.accelerator``,
``torch.Stream``, ``torch.Event``, and the device's module, whose functions have the same names for all types. Without
an accelerator, tensors are computed on the host, which has neither streams nor events: work there runs in order.

A simulated device (:mod:`partita.prediction.simulate`) represents either an accelerator or the host. Its tensors have
shapes but no values: they are on torch's ``meta`` device. It has neither streams nor events, and its host is simulated,
too.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._triton import has_triton_package

from partita.errors import ConfigError, PartitaError

HOST = torch.device("cpu")
SIMULATED = torch.device("meta")
# The device type of most clusters.
USUAL_KIND = "cuda"
# Device types whose autocast keys torch does not use. A simulated host and a simulated accelerator use them.
WITHOUT_AUTOCAST = {HOST.type: "ipu", USUAL_KIND: "hpu"}
# Kinds that Triton has a compiler for.
TRITON_KINDS = (USUAL_KIND, "xpu")
# The device type that the simulated device represents.
_simulated_kind = HOST.type


def device_type() -> str:
    """Return the type of the device that computes: ``cpu``, ``cuda``, ``xpu``, ..."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return HOST.type
    if found.type == "mps":
        warnings.warn(
            "PyTorch's mps device is not used, training runs on the CPU: mps has no process groups, and no float64, "
            "which the gradient norm needs",
            stacklevel=3,
        )
        return HOST.type
    return found.type


def own_device(local_rank: int | None, *, shared: bool = False) -> torch.device:
    """Return this rank's device: the only visible device (Slurm's ``--gpus-per-task``, Ray and Kubernetes hide the
    others), or else the device with index ``local_rank``; without a local rank, the current device
    (``torch.cuda.set_device``).

    Args:
        shared: ranks may share a device; if there are fewer devices than ranks, they take turns.

    Raises:
        ConfigError: several devices are visible, but fewer than the node has ranks.
    """
    kind = device_type()
    if kind == HOST.type:
        return HOST
    if local_rank is None:
        return torch.device(kind, torch.accelerator.current_device_index())
    if (num := count()) == 1:
        return torch.device(kind, 0)
    if local_rank >= num and not shared:
        raise ConfigError(
            f"device: local rank {local_rank} has no {kind} device: expected one visible device, or at least "
            f"{local_rank + 1}; got {num}. Start at most {num} processes per node, or let ranks share devices, for "
            "tests (communication.through_host: true)"
        )
    return torch.device(kind, local_rank % num)


def chosen_device(wanted: object, local_rank: int | None, *, shared: bool = False) -> torch.device:
    """Return the device that the user has chosen; without an index, this rank's device (see :func:`own_device`).

    Raises:
        ConfigError: it is not a device, or this machine does not have it.
    """
    expected = "cpu" if (kind := device_type()) == HOST.type else f"cpu, {kind}, or {kind}:0 to {kind}:{count() - 1}"
    try:
        device = torch.device(wanted) if isinstance(wanted, torch.device | str) else None
    except RuntimeError:
        device = None
    if device is None:
        shown = f"a {type(wanted).__name__}" if not isinstance(wanted, str) else f"'{wanted}'"
        raise ConfigError(f"device: expected a torch.device, or the name of one ({expected}); got {shown}")
    if device.type == HOST.type:
        return HOST
    if device.type != kind or (device.index or 0) >= count():
        raise ConfigError(f"device: expected one that this machine trains on ({expected}); got '{device}'")
    return own_device(local_rank, shared=shared) if str(device) == kind else device


def usual_kind(one_memory: bool) -> str:
    """Return the device type to assume for a machine: ``one_memory`` if host and device share one memory."""
    return HOST.type if one_memory else USUAL_KIND


@contextmanager
def simulating(kind: str) -> Iterator[None]:
    """Make the simulated device represent this device type (``cpu``, ``cuda``, ...) inside a block."""
    global _simulated_kind
    before, _simulated_kind = _simulated_kind, kind
    try:
        yield
    finally:
        _simulated_kind = before


def is_simulated(device: torch.device) -> bool:
    """Return whether tensors on the device have no memory and no values."""
    return device.type == SIMULATED.type


def kind_of(device: torch.device) -> str:
    """Return the device's type; for a simulated device, the type that it represents."""
    return _simulated_kind if is_simulated(device) else device.type


def is_host(device: torch.device) -> bool:
    """Return whether the device is the host."""
    return kind_of(device) == HOST.type


def has_streams(device: torch.device) -> bool:
    """Return whether work on the device is asynchronous to the host."""
    return not is_host(device) and not is_simulated(device)


def host_of(device: torch.device) -> torch.device:
    """Return the host device of this device: ``cpu``, or ``meta`` if it is simulated."""
    return device if is_simulated(device) else HOST


def readable(device: torch.device) -> torch.device:
    """Return the device for tensors that ranks exchange and whose values they read: not a simulated one."""
    return HOST if is_simulated(device) else device


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the host; ones for a tensor on a simulated device, which has no values."""
    tensor = tensor.detach()
    return torch.ones_like(tensor, device=HOST) if is_simulated(tensor.device) else tensor.cpu()


def set_device(device: torch.device) -> None:
    """Make the calling thread use this accelerator by default."""
    torch.accelerator.set_device_index(device)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make the calling thread use this device inside a block."""
    return torch.accelerator.device_index(device.index) if has_streams(device) else nullcontext()


def runs_triton(device: torch.device) -> bool:
    """Return True if Triton is installed and compiles for this device."""
    return device.type in TRITON_KINDS and has_triton_package()


def count() -> int:
    """Return the number of this machine's accelerators that partita uses."""
    return 0 if device_type() == HOST.type else torch.accelerator.device_count()


def installed() -> list[tuple[str, int]]:
    """Return the name and the bytes of memory of each accelerator that partita uses."""
    module = torch.get_device_module(device_type())
    found = [module.get_device_properties(index) for index in range(count())]
    return [(properties.name, properties.total_memory) for properties in found]


def name(device: torch.device) -> str:
    """Return the name that an accelerator's driver gives it."""
    return str(torch.get_device_module(device).get_device_properties(device).name)


def identity(device: torch.device) -> tuple[str, str] | None:
    """Return an accelerator's UUID, and its name in this process. Processes of a node for which both are equal use the
    same device. None if PyTorch does not know the UUID, or it is not an accelerator.
    """
    if not has_streams(device):
        return None
    uuid = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    return None if uuid is None else (str(uuid), str(device))


def new_stream(device: torch.device) -> torch.Stream | None:
    """Return a new side stream; None on the host."""
    return torch.Stream(device=device) if has_streams(device) else None


def new_event(device: torch.device) -> torch.Event:
    """Return a new event of an accelerator."""
    return torch.Event(device=device)


def record_event(event: torch.Event, device: torch.device) -> None:
    """Record an event on an accelerator's current stream. (``event.record()`` uses the calling thread's device.)"""
    event.record(torch.accelerator.current_stream(device))


def wait_for_event(event: torch.Event, device: torch.device) -> None:
    """Make an accelerator's current stream wait for an event."""
    event.wait(torch.accelerator.current_stream(device))


def timed_event(device: torch.device) -> torch.Event:
    """Record an event on an accelerator's current stream; its ``elapsed_time`` to a later one is in milliseconds."""
    event = torch.Event(device=device, enable_timing=True)
    record_event(event, device)
    return event


def wait_for_stream(device: torch.device) -> None:
    """Block the caller until all work queued on the current stream is done."""
    if has_streams(device):
        torch.accelerator.current_stream(device).synchronize()


def wait_for_all(device: torch.device) -> None:
    """Block the caller until all work queued on any stream is done."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


def completes_within(device: torch.device, seconds: float) -> bool:
    """Block the caller for at most ``seconds``; return whether all work queued on any stream is done."""
    if not has_streams(device):
        return True

    def wait() -> None:
        with suppress(RuntimeError):  # of the work; the next call of the device raises it
            wait_for_all(device)

    waiting = threading.Thread(target=wait, name="partita wait", daemon=True)
    waiting.start()
    waiting.join(seconds)
    return not waiting.is_alive()


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator's memory; memory in use by other processes is not free."""
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def reclaim(device: torch.device) -> None:
    """Release the memory of an accelerator that PyTorch caches for later tensors."""
    if has_streams(device):
        torch.get_device_module(device).empty_cache()


def allocated_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of this process's tensors in an accelerator's memory, now and at their peak; 0 on the host."""
    if not has_streams(device):
        return 0, 0
    module = torch.get_device_module(device)
    return module.memory_allocated(device), module.max_memory_allocated(device)


def pin(address: int, num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Register existing host memory with the device, so that copies to and from it do not block the caller.

    Returns a function that undoes it. PyTorch offers this for CUDA and ROCm. For other device types the memory is not
    pinned, and copies block the caller.

    Raises:
        PartitaError: that many bytes cannot be pinned.
    """
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    if runtime is None:
        warnings.warn(
            f"PyTorch cannot pin existing host memory for {device.type}: copies between the host and the device block "
            "the caller, so offload (zero.offload) is slower",
            stacklevel=2,
        )
        return lambda: None
    calls = runtime()
    status = calls.cudaHostRegister(address, num_bytes, 0)
    if int(status):
        # The runtime stores the error, and PyTorch would raise it at the next kernel launch: clear it here.
        with suppress(RuntimeError, AssertionError):  # AssertionError: PyTorch is built without the device
            torch.empty(1, dtype=torch.float32, device=device).fill_(0)
        raise PartitaError(
            f"{device.type} cannot pin {num_bytes} bytes of host memory ({calls.cudaGetErrorString(status)}): raise "
            "the limit of locked memory (`ulimit -l unlimited`, or the container's), or offload less to the host"
        )
    return lambda: calls.cudaHostUnregister(address)


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of an accelerator's generator."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def seed(number: int, device: torch.device) -> None:
    """Seed an accelerator's generator with a number."""
    with torch.get_device_module(device).device(device):
        torch.get_device_module(device).manual_seed(number)


def backend(device: torch.device) -> str:
    """Return the backend of process groups for tensors on the device: gloo, nccl, xccl, or the one registered for it.

    Raises:
        PartitaError: there is none.
    """
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise PartitaError(
            f"torch.distributed has no backend for {device.type}: import the package that registers one "
            "(torch.distributed.Backend.register_backend) before partita.initialize"
        ) from error
