"""Configs that tests train under, and matrices of tests.

`ZERO` are `zero` sections: the ZeRO stages on the device. `PLANS` are whole configs: these, states on other tiers of
memory, lean states, recomputed activations.

Of a matrix `make test` runs as many cells as have every value once, `make test-all` all of them.
"""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

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
    """Values to parametrize a test by, of which those that are not in the ``sample`` are marked `thorough`."""
    values = list(values)
    assert all(value in values for value in sample), f"{sample} are not all among {values}"
    params = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [() if value in sample else pytest.mark.thorough for value in values]
    return [pytest.param(*param, marks=mark) for param, mark in zip(params, marks, strict=True)]


def matrix(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations; those beyond a sample are marked `thorough`."""
    values = [list(axis) for axis in axes.values()]
    cells = list(product(*(range(len(axis)) for axis in values)))
    sample = _sample(cells)
    params = []
    for cell in cells:
        marks = [] if cell in sample else [pytest.mark.thorough]
        params.append(pytest.param(*(axis[at] for axis, at in zip(values, cell, strict=True)), marks=marks))
    return pytest.mark.parametrize(tuple(axes), params)


def _sample(cells: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Cells that have every value of every axis, and of pairs of values as many as so few can have."""
    left = {place for cell in cells for place in enumerate(cell)}
    met, taken = set[Any](), set[tuple[int, ...]]()
    while left:
        best = max(cells, key=lambda cell: (len(left.intersection(enumerate(cell))), len(_pairs(cell) - met)))
        left.difference_update(enumerate(best))
        met |= _pairs(best)
        taken.add(best)
    return taken


def _pairs(cell: tuple[int, ...]) -> set[Any]:
    return set(combinations(enumerate(cell), 2))
