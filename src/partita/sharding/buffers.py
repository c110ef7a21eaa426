"""Buffers that a forward changes (BatchNorm's running statistics) follow the first rank that runs the same modules, as
in DistributedDataParallel, and do so before the step ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from partita.comm.collectives import Collectives
from partita.memory.streams import after, record
from partita.plan.mesh_shape import MODULE_AXES

# A buffer of this name marks statistics that torch's kernels write without counting a version.
RUNNING = "running_mean"


class BufferSync:
    """Broadcasts the buffers that change: at the end of a micro-batch, so that every rank evaluates and saves with the
    same, and before a training forward, where another one or the user changed them since.

    Which ones do is read from their version counters, so constant buffers never travel; those of a module with running
    statistics, and what has changed once, always do, so that a rank that had nothing to run sends the same. Evaluation
    sends nothing: one rank may run it alone.
    """

    def __init__(self, model: nn.Module, collectives: Collectives, enabled: bool) -> None:
        self._model, self._mesh, self._group = model, collectives.mesh, collectives.group(MODULE_AXES)
        self._enabled = enabled and self._group.size > 1
        self._changing = {
            name
            for path, module in model.named_modules()
            if RUNNING in module._buffers
            for name, _ in module.named_buffers(path, recurse=False)
        }
        self._trained = False  # a training forward has run since they were sent
        self._versions = self._seen()

    def before_forward(self) -> None:
        """Collective where any buffer changed, which is the same on ranks that run the same modules."""
        if self._model.training:
            self._follow()
            self._trained = True

    def end_micro_batch(self) -> None:
        """Collective as :meth:`before_forward`."""
        self._trained |= self._model.training
        self._follow()

    def _follow(self) -> None:
        if not self._enabled:
            return
        before, self._versions = self._versions, self._seen()
        changed = {name for name, version in self._versions.items() if before.get(name) != version}
        self._changing |= changed
        if changed or self._trained:
            sent = [buffer.detach() for name, buffer in self._model.named_buffers() if name in self._changing]
            # In its turn among the gathers, whose connections these are.
            send = partial(after, [record(self._mesh.device)], self._group.broadcast, sent, "buffers")
            self._mesh.stream("parameters").run(send).wait()
            self._versions = self._seen()
        self._trained = False

    def _seen(self) -> dict[str, tuple[int, int]]:
        """Which tensor each buffer is now, and its version."""
        return {name: (id(buffer), buffer._version) for name, buffer in self._model.named_buffers()}


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
