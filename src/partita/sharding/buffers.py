"""Buffers that a forward changes (BatchNorm's running statistics) follow the first rank that runs the same modules, as
in DistributedDataParallel, and do so before the step ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.memory.streams import after, record
from partita.plan.mesh_shape import MODULE_AXES
from partita.sharding.structure import Structure

# A buffer of this name marks statistics that torch's kernels write without counting a version.
RUNNING = "running_mean"


class BufferSync:
    """Broadcasts the buffers that change: at the end of a micro-batch, so that every rank evaluates and saves with the
    same, and before a training forward, where another one or the user changed them since.

    Which ones do is read from their version counters, so constant buffers never travel; those of a module with running
    statistics, and what has changed once, always do, so that a rank that had nothing to run sends the same. Evaluation
    sends nothing: one rank may run it alone.
    """

    def __init__(self, structure: Structure, collectives: Collectives, enabled: bool) -> None:
        self._structure, self._mesh, self._group = structure, collectives.mesh, collectives.group(MODULE_AXES)
        self._enabled = enabled and self._group.size > 1
        running = {id(module) for module in structure.modules if RUNNING in module._buffers}
        self._changing = {key for key in self._found() if key[0] in running}
        self._trained = False  # a training forward has run since they were sent
        self._versions = self._seen()

    def before_forward(self) -> None:
        """Collective where any buffer changed, which is the same on ranks that run the same modules."""
        if self._structure.model.training:
            self._follow()
            self._trained = True

    def end_micro_batch(self) -> None:
        """Collective as :meth:`before_forward`."""
        self._trained |= self._structure.model.training
        self._follow()

    def _follow(self) -> None:
        if not self._enabled:
            return
        before, self._versions = self._versions, self._seen()
        changed = {key for key, version in self._versions.items() if before.get(key) != version}
        self._changing |= changed
        if changed or self._trained:
            self._send({id(buffer): buffer.detach() for key, buffer in self._found().items() if key in self._changing})
        self._trained = False

    def _send(self, buffers: dict[int, Tensor]) -> None:
        """In its turn among the gathers, whose connections these are."""
        if buffers:
            awaited = [record(self._mesh.device)]
            send = partial(after, awaited, self._group.broadcast, list(buffers.values()), "buffers")
            self._mesh.stream("parameters").run(send).wait()
            self._versions = self._seen()

    def _found(self) -> dict[tuple[int, str], Tensor]:
        """Every buffer, by its module's id and its name there, in the model's order."""
        return {
            (id(module), name): buffer
            for module in self._structure.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _seen(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Which tensor each buffer is now, and its version."""
        return {key: (id(buffer), buffer._version) for key, buffer in self._found().items()}


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """A block that leaves a module's buffers as they were, whatever its forward does to them."""
    own = [(inner, name, buffer) for inner in module.modules() for name, buffer in inner._buffers.items()]
    for inner, name, buffer in own:
        inner._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for inner, name, buffer in own:
            inner._buffers[name] = buffer
