"""Test of the formatting of byte counts."""

import pytest

from partita.config.messages import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (812_345_678, "812 MB"), (1.5e9, "1.5 GB"), (2.25e12, "2.25 TB")],
)
def test_bytes_have_three_digits(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text
