"""A backend of Ray Train whose workers are the ranks of an engine."""

import socket
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.torch import TorchConfig

from partita.config.launchers import LaunchEnvironment, set_launch_environment
from partita.errors import ConfigError


@dataclass
class PartitaTorchConfig(TorchConfig):
    """Ray Train's configuration of partita: ``TorchTrainer(..., torch_config=PartitaTorchConfig())``.

    Each worker gets its rank and the rendezvous address in torchrun's environment variables. ``partita.initialize``
    starts the process group, with the backends that it needs and with ``communication.timeout_s``.

    Raises:
        ConfigError: a field of ``TorchConfig`` is set.
    """

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if given:
            raise ConfigError(
                f"PartitaTorchConfig({given[0]}=...): partita starts the process group; its time-out is "
                "communication.timeout_s of the engine's config: leave the argument out"
            )

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend that Ray runs before the training function."""
        return PartitaBackend


class PartitaBackend(Backend):
    """A backend that sets each worker's rank."""

    share_cuda_visible_devices = True  # a rank computes on the device of its local rank

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Choose an address on the first worker, and set the environment variables of each worker."""
        worker_group.execute(_set_rank, worker_group.execute_single(0, _free_address))


def _free_address() -> tuple[str, int]:
    """Return this node's address and a free port."""
    host: str = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as tried:
        tried.bind((host, 0))
        return host, int(tried.getsockname()[1])


def _set_rank(address: tuple[str, int]) -> None:
    context = ray.train.get_context()
    launch = LaunchEnvironment(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
    )
    set_launch_environment(launch, *address)
