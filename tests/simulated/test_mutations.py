"""Tests that removed waits in src/ are found. `python -m tests.simulated.mutations` runs the full list."""

from pathlib import Path

import pytest

from tests.simulated.mutations import MUTATIONS, Mutation, found

SAMPLE = [mutation for mutation in MUTATIONS if mutation.plan in ("stage 0", "saved while training waits")]


def test_every_snippet_occurs() -> None:
    assert len(MUTATIONS) >= 20
    for mutation in MUTATIONS:
        assert mutation.text


def test_a_snippet_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="memory/streams.py: occurs 0 times, not once: 'nothing of it'"):
        _ = Mutation("memory/streams.py", "nothing of it", "", "stage 3").text


def shows(mutation: Mutation, folder: Path) -> bool:
    """Return True if one of three runs finds a mutation: the order of threads varies, and not every order races."""
    return any(found(mutation, folder / str(number)) for number in range(3))


@pytest.mark.parametrize("mutation", SAMPLE, ids=lambda mutation: f"{mutation.file}: {' '.join(mutation.old.split())}")
def test_a_sample_is_found(mutation: Mutation, tmp_path: Path) -> None:
    assert shows(mutation, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {' '.join(mutation.old.split())}"
)
def test_each_is_found(mutation: Mutation, tmp_path: Path) -> None:
    assert shows(mutation, tmp_path)
