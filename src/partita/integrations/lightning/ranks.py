"""A strategy's processes as ranks of the mesh: what each of them is fed."""

from typing import Protocol

from partita.config.launchers import set_local_world_size
from partita.config.resolve import resolve
from partita.config.schema import Config
from partita.integrations.fed import fed
from partita.memory import accelerator
from partita.plan.mesh_shape import MeshShape


class Processes(Protocol):
    """What Lightning's strategies, of Trainer and Fabric alike, know of their processes."""

    @property
    def num_nodes(self) -> int:
        """Of the job."""

    @property
    def num_processes(self) -> int:
        """Per node."""

    @property
    def global_rank(self) -> int:
        """This process's."""


class Ranks:
    """The places of ``processes`` in the mesh of a ``config``."""

    def __init__(self, processes: Processes, config: Config) -> None:
        self._processes = processes
        self._config = config

    @property
    def _mesh(self) -> MeshShape:
        num_ranks = self._processes.num_nodes * self._processes.num_processes
        return resolve(self._config, num_ranks, accelerator.HOST.type).mesh

    def joined(self, loop: str) -> None:
        """The processes have met. What ``loop`` does not feed is found here.

        Raises:
            ConfigError: the mesh has a pipeline.
        """
        if self._processes.num_nodes > 1:
            set_local_world_size(self._processes.num_processes)  # Lightning's own launch tells nobody
        fed(self._mesh, self._processes.global_rank, loop)

    @property
    def sampler_arguments(self) -> dict[str, int]:
        """Of the samplers that Lightning makes: ranks with one data coordinate are fed the same samples."""
        mesh = self._mesh
        return {"num_replicas": mesh.data, "rank": mesh.coordinate(self._processes.global_rank, "data")}
