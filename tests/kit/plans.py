"""Configs for training tests, and decorators that run a test on combinations of values.

`ZERO` has `zero` sections: the ZeRO stages on the device. `PLANS` has full configs: the stages, states offloaded to
host and disk, lean states, recomputed activations.

From a matrix, `make test` runs enough cells to cover every value once, `make test-all` enough to cover every pair of
values, and `make test-all MATRIX=full` all cells.
"""

import os
from collections.abc import Collection, Iterable
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest

Cell = tuple[int, ...]
ON_HOST = {"parameters": "host", "optimizer": "host"}
ON_DISK = {"parameters": "disk", "optimizer": "disk"}
LEAN = {"compute": "bf16", "master": "split", "moments": "int8", "gradients": "bf16"}
ZERO: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "3-kept": {"stage": 3, "keep_gathered": True},
}
TIERS: dict[str, dict[str, Any]] = {
    "3-host": {"stage": 3, "offload": ON_HOST},
    "3-disk": {"stage": 3, "offload": ON_DISK},
}
PLANS: dict[str, dict[str, Any]] = {
    **{name: {"zero": zero} for name, zero in (ZERO | TIERS).items()},
    "3-lean": {"zero": {"stage": 3}, "precision": LEAN},
    "3-recomputed": {"zero": {"stage": 3}, "activations": {"checkpoint": "units"}},
}


def sampled(values: Iterable[Any], *sample: Any) -> list[Any]:
    """Return pytest parameters for ``values``; those that are not in the ``sample`` are marked `thorough`."""
    values = list(values)
    assert all(value in values for value in sample), f"{sample} are not all among {values}"
    params = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [() if value in sample else pytest.mark.thorough for value in values]
    return [pytest.param(*param, marks=mark) for param, mark in zip(params, marks, strict=True)]


def matrix(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over combinations of values.

    `make test` runs enough combinations to cover every value once. The others are marked `thorough`: enough to cover
    every pair of values, or all of them with MATRIX=full in the environment.
    """
    values = [list(axis) for axis in axes.values()]
    cells = list(product(*(range(len(axis)) for axis in values)))
    sample = _covering(cells, 1)
    chosen = cells if os.environ.get("MATRIX") == "full" else _covering(cells, 2, sample)
    params = []
    for cell in sorted(chosen):
        marks = [] if cell in sample else [pytest.mark.thorough]
        found = [axis[at] for axis, at in zip(values, cell, strict=True)]
        names = [_name(value, f"{axis}{at}") for axis, at, value in zip(axes, cell, found, strict=True)]
        params.append(pytest.param(*found, marks=marks, id="-".join(names)))
    return pytest.mark.parametrize(tuple(axes), params)


def _name(value: Any, place: str) -> str:
    """Return the value's text in a test's id, as pytest does.

    A value without a text gets its place on the axis, which does not depend on the other cells.
    """
    if value is None or isinstance(value, str | int | float):
        return str(value)
    return str(getattr(value, "__name__", place))


def _covering(cells: list[Cell], strength: int, taken: Collection[Cell] = ()) -> set[Cell]:
    """Return cells, including ``taken``, that cover every combination of ``strength`` values of different axes.

    Among equally good cells, the greedy search prefers those with new pairs of values.
    """
    chosen = set(taken)
    strength = min(strength, len(cells[0]))
    left = {combination for cell in cells for combination in _combinations(cell, strength)}
    left.difference_update(*(_combinations(cell, strength) for cell in chosen))
    pairs = set[Any]().union(*(_combinations(cell, 2) for cell in chosen))
    while left:
        best = max(
            cells,
            key=lambda cell: (len(left & _combinations(cell, strength)), len(_combinations(cell, 2) - pairs)),
        )
        left -= _combinations(best, strength)
        pairs |= _combinations(best, 2)
        chosen.add(best)
    return chosen


@cache
def _combinations(cell: Cell, strength: int) -> frozenset[Any]:
    return frozenset(combinations(enumerate(cell), strength))
