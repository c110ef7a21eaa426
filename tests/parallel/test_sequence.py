"""Sequence parallelism: one process's losses and gradients, on unmodified models."""

from tests.local import pool
from tests.matrix import matrix
from tests.parallel import sequence
from tests.parallel.sequence import MODELS


@matrix(name=list(MODELS), ranks=[2, 3])
def test_losses_and_gradients_are_those_of_one_process(name: str, ranks: int) -> None:
    """23 positions on 2 and on 3 ranks, 14 then; masks, padding, ignored labels, sliding windows, grouped heads."""
    for loss, gradient, where in pool.run(ranks, sequence.both_ways, name, timeout=120):
        assert loss < 1e-5
        assert gradient < 1e-5, where
