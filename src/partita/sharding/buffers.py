"""Synchronization of buffers that forward changes, such as BatchNorm's running statistics and codebooks.

As in DistributedDataParallel, they are broadcast from the first of the ranks that run the same modules, before the step
ends.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from partita.comm.collectives import Collectives
from partita.comm.several_axes import SeveralAxes
from partita.errors import PartitaError
from partita.memory import accelerator
from partita.memory.streams import after, record
from partita.sharding.structure import Structure, checksum
from partita.table.mesh_shape import STATE_AXES, TENSOR_AXES
from partita.table.state_plan import StatePlan

# A module with a buffer of this name has statistics that torch's kernels write without counting a version.
RUNNING = "running_mean"
# Maximum number of updates between two comparisons of the contents of buffers that have not changed yet.
COMPARED_EVERY = 64

_Key = tuple[int, str]  # the id of the module that has the buffer, and the buffer's name there


@dataclass(frozen=True)
class _Form:
    """Properties of a buffer that must be equal on two ranks for a broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, buffer: Tensor) -> "_Form":
        return cls(tuple(buffer.shape), buffer.dtype, buffer.device.type)

    def __str__(self) -> str:
        return f"{list(self.shape)} in {str(self.dtype).removeprefix('torch.')} on {self.device}"


@dataclass(frozen=True)
class _Followed:
    """A buffer that is broadcast; equal on all ranks."""

    name: str
    form: _Form


class BufferSync:
    """Broadcasts the buffers that change.

    It does so at the end of a micro-batch, so that every rank evaluates and saves with the same values, and before a
    training forward if another forward or the user changed them since.

    Buffers that never change are never broadcast. A change is found by the buffer's version counter. Writes through
    ``.data`` do not count there; they are found by comparing the contents after the updates 1, 2, 4, ... and then after
    every ``COMPARED_EVERY``-th. A buffer is broadcast from the update at which the ranks agree that it has changed
    (:meth:`agree`); buffers of modules with running statistics are broadcast from the start. So all ranks broadcast the
    same buffers, also ranks that did not run a module. Evaluation broadcasts nothing: one rank may run it alone.
    """

    def __init__(self, structure: Structure, collectives: Collectives, row: StatePlan, enabled: bool) -> None:
        self._structure = structure
        self._mesh = collectives.mesh
        hops = row.hops(STATE_AXES, collectives.mesh.shape)[::-1]
        self._group = SeveralAxes(collectives, [*hops, TENSOR_AXES])
        self._enabled = enabled and self._group.size > 1
        names, found = self._names(), self._current_buffers()
        running = {id(module) for module in structure.modules if RUNNING in module._buffers}
        self._followed = {
            key: _Followed(names[key], _Form.of(buffer)) for key, buffer in found.items() if key[0] in running
        }
        self._changed = set[str]()  # names of buffers whose change on this rank is unknown to other ranks
        self._has_run = False  # a forward has run since changes were looked for
        self._has_trained = False  # a training forward has run since buffers were sent
        self._num_updates = 0
        self._versions = self._current_versions()
        self._sums = self._checksums()

    def before_forward(self) -> None:
        """Broadcast from the first rank if buffers changed, a collective of the ranks that run the same modules."""
        if self._structure.model.training:
            self._follow()
            self._has_trained = True
        self._has_run = True

    def end_micro_batch(self) -> None:
        """Broadcast from the first rank. A collective if a training forward has run on any rank."""
        self._has_trained |= self._structure.model.training
        self._follow()

    def has_changed(self) -> bool:
        """Return whether a buffer changed on this rank that is not broadcast yet, or not in its current shape, dtype or
        device; called once per update.
        """
        if not self._enabled:
            return False
        self._num_updates += 1
        if self._num_updates % min(COMPARED_EVERY, 1 << self._num_updates.bit_length() - 1) == 0:
            self._compare_contents()
        return bool(self._changed)

    def agree(self, call: str) -> None:
        """Make all ranks broadcast the buffers that changed on any of them. A collective.

        Raises:
            PartitaError: on all ranks that run the same modules: a buffer's shape, dtype or device differs between
                them.
        """
        if not self._enabled:
            return
        names, found = self._names(), self._current_buffers()
        own = {names[key]: _Form.of(buffer) for key, buffer in found.items()}
        every = self._group.exchange_objects((own, self._changed), call)
        self._changed = set[str]()
        changed = sorted(set[str]().union(*(names for _, names in every)))
        for name in changed:
            forms = [forms.get(name) for forms, _ in every]
            if (other := next((rank for rank, form in enumerate(forms) if form != forms[0]), None)) is not None:
                first, second = (forms[rank] or "missing" for rank in (0, other))
                ranks = self._group.ranks
                raise PartitaError(
                    f"buffer '{name}' has changed and is {first} on rank {ranks[0]}, {second} on rank {ranks[other]}: "
                    "buffers that change are broadcast from the first rank (communication.buffers: broadcast). Give it "
                    "one shape, dtype and device on all ranks, or set communication.buffers: local, which keeps each "
                    "rank's own values"
                )
        kept = {key: followed for key, followed in self._followed.items() if followed.name not in changed}
        keys = {name: key for key, name in names.items()}
        new = {keys[name]: _Followed(name, own[name]) for name in changed if name in own}
        self._followed = kept | new
        self._send(new)

    def _follow(self) -> None:
        if not self._enabled:
            return
        before, self._versions = self._versions, self._current_versions()
        changed = {key for key in before | self._versions if before.get(key) != self._versions.get(key)}
        by_user, self._has_run = not self._has_run, False
        sends = self._has_trained or (by_user and not changed.isdisjoint(self._followed))
        if changed:
            self._note(changed, sends)
        if by_user and self._changed:
            self.agree("buffers that were written outside forward")
        if sends:
            self._send(self._followed)
        self._has_trained = False

    def _note(self, changed: Iterable[_Key], sends: bool) -> None:
        """Record the changed buffers that other ranks have to be informed of at the next update.

        These are new ones, those with a new shape, dtype or device, and, if nothing is broadcast now, all: an
        evaluation may have run on this rank alone.
        """
        names, found = self._names(), self._current_buffers()
        for key in changed:
            followed, buffer = self._followed.get(key), found.get(key)
            if followed is None and key in names:
                self._changed.add(names[key])
            elif followed is not None and (not sends or buffer is None or _Form.of(buffer) != followed.form):
                self._changed.add(followed.name)

    def _compare_contents(self) -> None:
        """Find buffers that were written without a new version."""
        before, self._sums = self._sums, self._checksums()
        names = self._names()
        self._changed |= {names[key] for key, own in self._sums.items() if before.get(key, own) != own}

    def _send(self, followed: Iterable[_Key]) -> None:
        """Broadcast buffers on the stream of the gathers or reductions that use the same connections.

        If the form of this rank's buffer has changed since the ranks agreed, it takes part with temporary memory until
        they agree again.
        """
        found = self._current_buffers()
        buffers = []
        for key in followed:
            form, buffer = self._followed[key].form, found.get(key)
            if buffer is None or _Form.of(buffer) != form:
                buffer = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
            buffers.append(buffer.detach())
        if buffers:
            for group in self._group.groups:
                awaited = [record(self._mesh.device)]
                send = partial(after, awaited, group.broadcast, buffers, "buffers")
                self._mesh.stream(group.rare_purpose).run(send).wait()
            self._versions = self._current_versions()

    def _current_buffers(self) -> dict[_Key, Tensor]:
        """Return every buffer, in the model's order."""
        return {
            (id(module), name): buffer
            for module in self._structure.modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }

    def _names(self) -> dict[_Key, str]:
        """Return the names of the model's buffers, including those that are None."""
        return {
            (id(module), name): f"{path}.{name}" if path else name
            for path, module in self._structure.model.named_modules()
            for name in module._buffers
        }

    def _current_versions(self) -> dict[_Key, tuple[int, int]]:
        """Return the identity and the version of each buffer now."""
        return {key: (id(buffer), buffer._version) for key, buffer in self._current_buffers().items()}

    def _checksums(self) -> dict[_Key, int]:
        """Return a checksum of every buffer that is not broadcast."""
        if not self._enabled:
            return {}
        found = {key: buffer for key, buffer in self._current_buffers().items() if key not in self._followed}
        dense = {key: buffer for key, buffer in found.items() if type(buffer) is Tensor and _is_dense(buffer)}
        return {key: int(accelerator.read(checksum(_flat(buffer)))) for key, buffer in dense.items()}


def _is_dense(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and not buffer.is_quantized and not buffer.is_meta


def _flat(buffer: Tensor) -> Tensor:
    return buffer.detach().resolve_conj().resolve_neg().contiguous().view(-1)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Context that restores a module's buffers at its end, whatever its forward does to them."""
    own = [(inner, name, buffer) for inner in module.modules() for name, buffer in inner._buffers.items()]
    for inner, name, buffer in own:
        inner._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for inner, name, buffer in own:
            inner._buffers[name] = buffer
