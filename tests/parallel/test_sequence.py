"""Sequence parallelism: one process's losses and gradients, on unmodified models."""

from tests.local import pool
from tests.matrix import matrix
from tests.parallel import sequence


@matrix(name=sequence.NAMES, ranks=[2, 3])
def test_losses_and_gradients_are_those_of_one_process(name: str, ranks: int) -> None:
    """Masks on both sides, ignored labels, sliding windows, grouped heads, both directions, lengths that change."""
    for found in pool.run(ranks, sequence.beside_whole, name, timeout=120):
        assert found.loss < 1e-5
        assert found.gradient < 1e-5, found.name
