"""``deepspeed.accelerator``: the device that this process computes on."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from partita.comm import world
from partita.config.launchers import launch_environment
from partita.integrations.deepspeed.unsupported import ACCELERATOR, missing, missing_attribute
from partita.memory import accelerator


class Accelerator:
    """The accelerator that partita uses; the host on a machine without one."""

    @property
    def _name(self) -> str:
        return accelerator.device_type()

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Return the name for ``tensor.to``: ``cuda``, ``cuda:1``, or ``cpu``."""
        kind = self._name
        return kind if device_index is None or accelerator.is_host(torch.device(kind)) else f"{kind}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which the device is the current one."""
        return accelerator.on_device(self._at(device_index))

    def current_device(self) -> int:
        """Return the index of this rank's device; 0 on the host."""
        return self._at(None).index or 0

    def current_device_name(self) -> str:
        return str(self._at(None))

    def device_count(self) -> int:
        """Return the number of accelerators on this machine; 1 without one."""
        return accelerator.count() or 1

    def set_device(self, device_index: int) -> None:
        """Make this device the current one; it has no effect on the host."""
        device = self._at(device_index)
        if not accelerator.is_host(device):
            accelerator.set_device(device)

    def communication_backend_name(self) -> str:
        return accelerator.backend(self._at(None))

    def synchronize(self, device_index: int | None = None) -> None:
        accelerator.wait_for_all(self._at(device_index))

    def empty_cache(self) -> None:
        accelerator.reclaim(self._at(None))

    def memory_allocated(self, device_index: int | None = None) -> int:
        return accelerator.allocated_bytes(self._at(device_index))[0]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return accelerator.allocated_bytes(self._at(device_index))[1]

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of the host and of all devices."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned memory; on the host, the tensor itself."""
        return tensor if accelerator.is_host(self._at(None)) else tensor.pin_memory()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return accelerator.kind_of(tensor.device) == self._name

    def __getattr__(self, name: str) -> NoReturn:
        raise missing_attribute("get_accelerator()", name, ACCELERATOR)

    def _at(self, index: int | None) -> torch.device:
        if index is None:
            return accelerator.own_device(launch_environment(running=world.running()).local_rank)
        return torch.device(self.device_name(index))


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return _accelerator


def __getattr__(name: str) -> NoReturn:
    raise missing("deepspeed.accelerator", name, ACCELERATOR)
