"""Buffers and attributes that a module's forward changes (the vectors of a spectral norm, an observer's maximum).

A recomputed forward reads the values that the first one read, and does not change them again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.errors import PartitaError
from partita.memory.accelerator import is_simulated
from partita.sharding.buffers import RUNNING, buffers_kept

# Buffers up to this size are copied before every forward; larger ones only if an earlier forward has changed them.
_SMALL_BYTES = 1 << 16

_NO_VALUE = object()


@dataclass
class _Entry:
    """A buffer or an attribute of a module: an entry of the dict ``values``.

    Attributes:
        changes: a forward has changed the value.
        is_free: torch's kernels change the buffer without increasing its version counter.
    """

    values: dict[str, Any]
    name: str
    fqn: str
    is_buffer: bool
    changes: bool = False
    is_free: bool = False

    @property
    def key(self) -> tuple[int, str]:
        return id(self.values), self.name

    @property
    def value(self) -> Any:
        return self.values.get(self.name, _NO_VALUE)

    def set(self, value: Any) -> None:
        if value is _NO_VALUE:
            self.values.pop(self.name, None)
        else:
            self.values[self.name] = value


class ForwardState:
    """Finds the buffers and attributes that a module's forward changes: in the first forward by comparing values, later
    by version counters.

    Args:
        name: the module's name, for errors.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._places: list[_Entry] | None = None  # None before the first forward

    @property
    def is_first(self) -> bool:
        return self._places is None

    def places(self) -> list[_Entry]:
        """Return the buffers and attributes that the next forward may change."""
        return list(self._found()) if self._places is None else self._places

    def first_has_run(self, places: Sequence[_Entry]) -> list[_Entry]:
        """Store the buffers, and the attributes that the first forward has changed; return the new attributes."""
        known = {place.key for place in places}
        new = [place for place in self._found() if place.key not in known]
        self._places = [place for place in (*places, *new) if place.is_buffer or place.changes or place in new]
        return new

    def _found(self) -> Iterator[_Entry]:
        for prefix, module in self.module.named_modules(prefix=self.name):
            is_free = RUNNING in module._buffers
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield _Entry(module._buffers, name, f"{prefix}.{name}", is_buffer=True, is_free=is_free)
            for name, value in vars(module).items():
                if name != "training" and _is_state(value):
                    yield _Entry(vars(module), name, f"{prefix}.{name}", is_buffer=False)


@dataclass(frozen=True)
class _Snapshot:
    """A value before a forward, its version, and a copy of it (or ``_NO_VALUE``)."""

    place: _Entry
    value: Any
    version: int
    copy: Any


class ForwardCall:
    """One forward: the context of the first run; :meth:`repeated` is the context of each recomputation.

    Raises:
        PartitaError: the forward has changed a buffer whose previous values were not copied.
    """

    def __init__(self, state: ForwardState) -> None:
        self._state = state
        self._snapshots = list[_Snapshot]()  # while the forward runs
        self._changed = list[_Snapshot]()
        self._unchanged = list[_Snapshot]()  # buffers that the forward has not changed

    def __enter__(self) -> None:
        first = self._state.is_first
        for place in self._state.places():
            value = place.value
            copy = _copied(value) if first or place.changes or _is_small(value) else _NO_VALUE
            self._snapshots.append(_Snapshot(place, value, _version(value), copy))

    def __exit__(self, *raised: Any) -> None:
        first, snapshots, self._snapshots = self._state.is_first, self._snapshots, []
        if raised[0] is not None:
            return
        is_recomputation = (
            torch._C._current_graph_task_id() != -1
        )  # inside a recomputed module, whose buffers are copies
        for before in snapshots:
            place, value = before.place, before.place.value
            changed = value is not before.value or _version(value) != before.version
            if first and not changed and _has_values(value):
                changed = not torch.equal(before.copy, value)  # a write through .data does not increase the version
            if changed and before.copy is _NO_VALUE:
                raise PartitaError(
                    f"'{self._state.name}' is recomputed and has changed its buffer '{place.fqn}' "
                    f"{tuple(before.value.shape)}, which its first forward did not change: the previous values, which "
                    "the recomputed forward would read, were not kept; leave the module out of activations.checkpoint"
                )
            place.changes |= changed
            if place.changes:
                self._changed.append(before)
            elif place.is_buffer and not place.is_free and not is_recomputation:
                self._unchanged.append(before if _is_small(value) else replace(before, copy=_NO_VALUE))
        if first:
            new = self._state.first_has_run([before.place for before in snapshots])
            self._changed += (_Snapshot(place, _NO_VALUE, 0, _NO_VALUE) for place in new)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Give the module the values from before the forward in the ``with`` block, and the current values after it.

        Raises:
            PartitaError: a buffer was changed since the forward.
        """
        changed = self._changed + [unchanged for unchanged in self._unchanged if self._was_changed(unchanged)]
        now = [(before.place, before.place.value) for before in changed if not before.place.is_buffer]
        with buffers_kept(self._state.module):
            for before in changed:
                before.place.set(_copied(before.copy))
            try:
                yield
            finally:
                for place, value in now:
                    place.set(value)

    def _was_changed(self, unchanged: _Snapshot) -> bool:
        """Return whether a buffer that the forward did not change was changed afterwards."""
        value = unchanged.place.value
        if value is unchanged.value and _version(value) == unchanged.version:
            return False
        if unchanged.copy is _NO_VALUE:
            raise PartitaError(
                f"'{self._state.name}' is recomputed, and its buffer '{unchanged.place.fqn}' was changed between its "
                "forward and its backward, so the recomputed forward would read other values: change it after the "
                "backward, or leave the module out of activations.checkpoint"
            )
        return True


def _is_state(value: object) -> bool:
    """Return whether a value may be state that a forward changes: a number, or a tensor without ``grad_fn``."""
    if isinstance(value, nn.Parameter):
        return False
    return isinstance(value, bool | int | float) or (isinstance(value, Tensor) and value.grad_fn is None)


def _is_small(value: object) -> bool:
    return not isinstance(value, Tensor) or value.nbytes <= _SMALL_BYTES


def _version(value: object) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _copied(value: Any) -> Any:
    return value.detach().clone() if _has_values(value) else value


def _has_values(value: object) -> bool:
    return isinstance(value, Tensor) and not (value.is_meta or is_simulated(value.device))
