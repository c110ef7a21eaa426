"""Matrices of tests: each cell of them in `make test-all`, in `make test` as many as have every value once."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


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
