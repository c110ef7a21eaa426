"""Layouts: the settings that each pattern requires and refuses, and the blocks that it selects."""

from typing import Any

import pytest

from partita import ConfigError
from partita.attention import Layout

ONES = ("111", "110", "011")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pattern": "diagonal"}, "attention.pattern: expected one of dense, sliding, .*; got 'diagonal'"),
        ({"pattern": "sliding"}, "attention.window: the pattern 'sliding' needs it"),
        ({"pattern": "bigbird", "window": 8, "num_global": 1}, "attention.random: the pattern 'bigbird' needs it"),
        ({"pattern": "dense", "window": 8}, "attention.window: the pattern 'dense' does not use it"),
        (
            {"pattern": "longformer", "window": 8, "num_global": 1, "num_random": 1},
            "attention.random: the pattern 'longfo",
        ),
        ({"pattern": "sliding", "window": (8, 16)}, "expected one window for the pattern 'sliding'; got \\[8, 16\\]"),
        ({"pattern": "sliding", "window": -1}, "positions, at least 1; got 64 and -1"),
        (
            {"pattern": "fixed", "window": 100, "num_global": 1},
            "attention.block: 64 does not divide attention.window 100, .* to a multiple of 64",
        ),
        ({"pattern": "fixed", "window": 64, "num_global": 2}, "2 blocks of 64 are more than a window of 64"),
        ({"pattern": "user"}, "attention.layout: the pattern 'user' needs it"),
        ({"pattern": "user", "rows": ("10", "1")}, "rows of 2 digits 0 and 1; row 1 is '1'"),
        ({"pattern": "user", "rows": ("1x",)}, "row 0 is '1x'"),
        ({"pattern": "user", "rows": ("10", "00"), "causal": False}, "row 1 leaves its queries without keys: set"),
        ({"pattern": "user", "rows": ("11", "10", "00")}, "row 2 leaves its queries without keys"),
        ({"pattern": "user", "rows": ("010", "111")}, "row 0 leaves its queries without keys .later keys"),
    ],
)
def test_what_makes_no_layout(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Layout(**settings)


def test_a_users_layout_must_cover_the_sequence() -> None:
    assert Layout("user", 8, rows=ONES).blocks(3, 3) == [[0], [0, 1], [1, 2]]
    assert Layout("user", 8, rows=ONES, causal=False).blocks(2, 2) == [[0, 1], [0, 1]]
    with pytest.raises(ConfigError, match="3 x 3 blocks of 8 positions do not cover 4 x 4 blocks"):
        Layout("user", 8, rows=ONES).blocks(4, 4)


@pytest.mark.parametrize("causal", [True, False])
def test_random_blocks_are_outside_the_window_and_always_the_same(causal: bool) -> None:
    layout = Layout("bigbird", 8, 16, num_global=1, num_random=3, causal=causal)
    found = layout.blocks(40, 40)
    for row, cols in enumerate(found):
        first = (row * 8 - 16 + causal) // 8
        last = row if causal else (row * 8 + 7 + 16) // 8
        others = [col for col in range(1, 40) if not first <= col <= last and (col < row or not causal)]
        if row == 0 and not causal:
            others = []  # the first row sees all blocks
        assert len(set(cols)) == len(cols) == min(3, len(others))
        assert set(cols) <= set(others)
    assert found == layout.blocks(40, 40)
    assert len({tuple(cols) for cols in found}) > 20
    if causal:
        assert layout.blocks(25, 25) == found[:25]


def test_summaries_of_the_fixed_pattern() -> None:
    causal = Layout("fixed", 8, 24, num_global=1)
    assert causal.blocks(9, 9) == [[], [], [], [2], [2], [2], [2, 5], [2, 5], [2, 5]]
    both = Layout("fixed", 8, 24, num_global=1, causal=False)
    assert both.blocks(7, 7) == [[5], [5], [5], [2], [2], [2], [2, 5]]
