"""Bytes of model states against the table in the ZeRO paper, row by row."""

import pytest

from benchmarks._papers_tables import LEAN, MIXED, SIZES, STATES_GB, state_bytes, state_rows
from partita.table.state_plan import further_stages


@pytest.mark.parametrize("data", STATES_GB)
def test_states_of_every_stage_are_the_papers(data: int) -> None:
    for num_params, claimed in zip(SIZES, STATES_GB[data], strict=True):
        for (_, name), figure in zip(further_stages("ddp"), claimed, strict=True):
            # The paper prints two or three digits.
            assert state_bytes(num_params, data, name, MIXED) == pytest.approx(figure * 1e9, rel=0.01, abs=5e6)


def test_lean_states_are_half_where_all_is_split() -> None:
    exact, lean = (state_bytes(1e12, 1024, "zero3", encodings) for encodings in (MIXED, LEAN))
    assert lean / exact == pytest.approx(0.5, rel=0.01)
    assert len(list(state_rows())) == 54
