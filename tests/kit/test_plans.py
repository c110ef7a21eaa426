"""Tests of `matrix`: the cells that `make test` and `make test-all` run."""

from itertools import combinations, product
from math import prod
from pathlib import Path

import pytest

from tests.kit.plans import matrix

SLOW = Path(__file__).parents[1] / "slow.txt"


@pytest.mark.parametrize("lengths", [(2, 2), (3, 2), (2, 11, 2), (1, 4), (2, 2, 2)])
def test_every_value_is_in_the_sample(lengths: tuple[int, ...]) -> None:
    axes = {f"axis_{number}": [f"{number}.{at}" for at in range(length)] for number, length in enumerate(lengths)}
    names, params = matrix(**axes).args
    assert names == tuple(axes)
    sample = [param.values for param in params if not param.marks]
    for number, values in enumerate(axes.values()):
        assert {cell[number] for cell in sample} == set(values)
    assert len({param.values for param in params}) == len(params)
    assert max(lengths) <= len(sample) < max(len(params), 2) or len(params) == max(lengths)


def test_the_sample_mixes_the_axes() -> None:
    _, params = matrix(one=range(11), two=range(2), three=range(2)).args
    sample = [param.values for param in params if not param.marks]
    assert {pair for cell in sample for pair in combinations(cell[1:], 2)} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("lengths", [(2,), (3, 2), (7, 8, 3, 2), (13, 7, 3)])
def test_every_pair_of_values_is_tested(lengths: tuple[int, ...]) -> None:
    axes = {f"axis_{number}": range(length) for number, length in enumerate(lengths)}
    cells = [param.values for param in matrix(**axes).args[1]]
    covered = {pair for cell in cells for pair in combinations(enumerate(cell), 2)}
    expected = {pair for cell in product(*axes.values()) for pair in combinations(enumerate(cell), 2)}
    assert covered == expected
    assert len(set(cells)) == len(cells) <= 1.3 * prod(sorted(lengths)[-2:])


def test_all_combinations_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = {"one": range(3), "two": range(4), "three": range(2)}
    by_default = matrix(**axes).args[1]
    monkeypatch.setenv("MATRIX", "full")
    every = matrix(**axes).args[1]
    assert [param.values for param in every] == list(product(*axes.values()))
    for some in (by_default, every):
        assert [p.values for p in some if not p.marks] == [p.values for p in by_default if not p.marks]


def test_slow_tests_are_there() -> None:
    for name in SLOW.read_text().splitlines():
        path, function = name.partition("[")[0].split("::")
        assert f"def {function}(" in (SLOW.parents[1] / path).read_text(), name
