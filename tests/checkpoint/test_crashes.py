"""A few random kills; ``benchmarks/crash_test.py`` runs hundreds."""

import random
from pathlib import Path

from tests.checkpoint import crashes
from tests.kit.ranks import on_ranks

KILLS = 3


def test_what_kills_leave_is_whole_and_goes_on(tmp_path: Path) -> None:
    expected = on_ranks(crashes.RANKS, crashes.uninterrupted, 1500, timeout=240)
    chance = random.Random()
    found = [crashes.kill_once(tmp_path, number, expected, chance) for number in range(KILLS)]
    assert found[-1].newest > 0
    assert [killed.newest for killed in found] == sorted(killed.newest for killed in found)
