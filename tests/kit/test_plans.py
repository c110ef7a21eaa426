"""The sample that `make test` takes of a matrix."""

from itertools import combinations
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


def test_slow_tests_are_there() -> None:
    for name in SLOW.read_text().splitlines():
        path, function = name.partition("[")[0].split("::")
        assert f"def {function}(" in (SLOW.parents[1] / path).read_text(), name
