"""Buffers that a forward changes (BatchNorm's running statistics) follow rank 0, as in DistributedDataParallel."""

from collections.abc import Iterator

from torch import Tensor, nn

from partita.comm.collectives import Collectives

DATA = ("data",)
# A buffer of this name marks statistics that torch's kernels write without counting a version.
RUNNING = "running_mean"


class BufferSync:
    """Broadcasts, before a training forward, the buffers that the forward before it changed.

    Which ones did is read from their version counters, so constant buffers never travel; those of a module with running
    statistics always do.
    """

    def __init__(self, model: nn.Module, collectives: Collectives, enabled: bool) -> None:
        self._model, self._collectives = model, collectives
        self._enabled = enabled and collectives.mesh.size("data") > 1
        self._versions: dict[int, int] = {}
        self._remember()

    def before_forward(self) -> None:
        """Collective where any buffer changed, which is the same on ranks that run the same modules."""
        if not self._enabled or not self._model.training:
            return
        changed = list(self._changed())
        if changed:
            self._collectives.broadcast([buffer.detach() for buffer in changed], DATA, "buffers")
            self._remember()

    def _changed(self) -> Iterator[Tensor]:
        for module in self._model.modules():
            for buffer in module._buffers.values():
                if buffer is None:
                    continue
                if RUNNING in module._buffers or self._versions.get(id(buffer)) != buffer._version:
                    yield buffer

    def _remember(self) -> None:
        self._versions = {id(buffer): buffer._version for buffer in self._model.buffers()}
