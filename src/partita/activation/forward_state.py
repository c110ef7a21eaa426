"""Buffers and attributes that a module's forward changes (the vectors of a spectral norm, an observer's maximum): a
repeated forward reads them as the first one did, and leaves them as they are.
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

# Buffers of at most so many bytes are copied before every forward; larger ones only if a forward has changed them.
_SMALL_BYTES = 1 << 16

_ABSENT = object()


@dataclass
class _Place:
    """A name in a dictionary of a module: its buffers, or its attributes.

    Attributes:
        changes: a forward has changed the value.
        is_free: torch's kernels change the value without counting a version.
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
        return self.values.get(self.name, _ABSENT)

    def set(self, value: Any) -> None:
        if value is _ABSENT:
            self.values.pop(self.name, None)
        else:
            self.values[self.name] = value


class ForwardState:
    """Finds what a module's forward changes: at its first forward by comparing values, later by version counters.

    Args:
        name: of the module, for errors.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self._places: list[_Place] | None = None  # what a forward may change; None before the first one

    @property
    def is_first(self) -> bool:
        return self._places is None

    def places(self) -> list[_Place]:
        """Return the buffers and attributes that the next forward may change."""
        return list(self._found()) if self._places is None else self._places

    def first_has_run(self, places: Sequence[_Place]) -> list[_Place]:
        """Remember the buffers and the attributes that the first forward has changed; return the new attributes."""
        known = {place.key for place in places}
        new = [place for place in self._found() if place.key not in known]
        self._places = [place for place in (*places, *new) if place.is_buffer or place.changes or place in new]
        return new

    def _found(self) -> Iterator[_Place]:
        for prefix, module in self.module.named_modules(prefix=self.name):
            is_free = RUNNING in module._buffers
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield _Place(module._buffers, name, f"{prefix}.{name}", is_buffer=True, is_free=is_free)
            for name, value in vars(module).items():
                if name != "training" and _is_state(value):
                    yield _Place(vars(module), name, f"{prefix}.{name}", is_buffer=False)


@dataclass(frozen=True)
class _Seen:
    """A value before a forward, its version then, and a copy of it (or ``_ABSENT``)."""

    place: _Place
    value: Any
    version: int
    copy: Any


class ForwardCall:
    """One forward: a ``with`` block around it, and :meth:`repeated` around each repetition.

    Raises:
        PartitaError: the forward has changed a buffer whose earlier values were not kept.
    """

    def __init__(self, state: ForwardState) -> None:
        self._state = state
        self._seen = list[_Seen]()  # while the forward runs
        self._changed = list[_Seen]()
        self._left = list[_Seen]()  # buffers that the forward has not changed

    def __enter__(self) -> None:
        first = self._state.is_first
        for place in self._state.places():
            value = place.value
            copy = _copied(value) if first or place.changes or _is_small(value) else _ABSENT
            self._seen.append(_Seen(place, value, _version(value), copy))

    def __exit__(self, *raised: Any) -> None:
        first, seen, self._seen = self._state.is_first, self._seen, []
        if raised[0] is not None:
            return
        repeats = torch._C._current_graph_task_id() != -1  # inside a module that is repeated, whose buffers are copies
        for before in seen:
            place, value = before.place, before.place.value
            changed = value is not before.value or _version(value) != before.version
            if first and not changed and _has_values(value):
                changed = not torch.equal(before.copy, value)  # a write through .data counts no version
            if changed and before.copy is _ABSENT:
                raise PartitaError(
                    f"'{self._state.name}' is recomputed and has changed its buffer '{place.fqn}' "
                    f"{tuple(before.value.shape)}, which its first forward did not: the earlier values, which the "
                    "repeated forward would read, were not kept; leave the module out of activations.checkpoint"
                )
            place.changes |= changed
            if place.changes:
                self._changed.append(before)
            elif place.is_buffer and not place.is_free and not repeats:
                self._left.append(before if _is_small(value) else replace(before, copy=_ABSENT))
        if first:
            new = self._state.first_has_run([before.place for before in seen])
            self._changed += (_Seen(place, _ABSENT, 0, _ABSENT) for place in new)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A block in which the module has the values from before the forward; then it has the present ones again.

        Raises:
            PartitaError: a buffer was changed since the forward.
        """
        changed = self._changed + [left for left in self._left if self._is_other(left)]
        now = [(before.place, before.place.value) for before in changed if not before.place.is_buffer]
        with buffers_kept(self._state.module):
            for before in changed:
                before.place.set(_copied(before.copy))
            try:
                yield
            finally:
                for place, value in now:
                    place.set(value)

    def _is_other(self, left: _Seen) -> bool:
        """True if a buffer was changed since the forward, which did not change it."""
        value = left.place.value
        if value is left.value and _version(value) == left.version:
            return False
        if left.copy is _ABSENT:
            raise PartitaError(
                f"'{self._state.name}' is recomputed, and its buffer '{left.place.fqn}' was changed between its "
                "forward and its backward, so the repeated forward would read other values: change it after the "
                "backward, or leave the module out of activations.checkpoint"
            )
        return True


def _is_state(value: object) -> bool:
    """True for what a forward may read and change: numbers, and tensors that are not results of an autograd graph."""
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
