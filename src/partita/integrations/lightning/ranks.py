"""Data-parallel positions of a strategy's processes, which select their samples."""

from typing import Protocol

from partita.config.launchers import set_local_world_size
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.integrations.data_rank import data_rank
from partita.memory import accelerator
from partita.table.mesh_shape import MeshShape


class Processes(Protocol):
    """The properties of processes that Lightning's strategies for Trainer and Fabric share."""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""

    @property
    def num_processes(self) -> int:
        """Number of processes per node."""

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""


class Ranks:
    """Positions of ``processes`` in the mesh of a ``config``."""

    def __init__(self, processes: Processes, config: Config) -> None:
        self._processes = processes
        self._config = config

    @property
    def _mesh(self) -> MeshShape:
        num_ranks = self._processes.num_nodes * self._processes.num_processes
        return resolve(self._config, num_ranks, accelerator.HOST.type).mesh

    def joined(self, loop: str) -> None:
        """Check that the training loop supports this mesh, after the processes are connected. ``loop`` is its name.

        Raises:
            ConfigError: the mesh has a pipeline.
        """
        if self._processes.num_nodes > 1:
            set_local_world_size(self._processes.num_processes)  # Lightning's own launcher does not set it
        data_rank(self._mesh, self._processes.global_rank, loop)

    @property
    def sampler_arguments(self) -> dict[str, int]:
        """Sampler arguments for Lightning; ranks with the same data coordinate read the same samples."""
        mesh = self._mesh
        return {"num_replicas": mesh.data, "rank": mesh.coordinate(self._processes.global_rank, "data")}
