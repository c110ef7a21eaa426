"""The factor that the loss of the backward under way was multiplied by, whichever engine did it.

One loss may go through the models of several engines with several loss scales; the gradients of each have the factor of
the engine that was asked for the backward, or none (``loss.backward()``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

_factors: list[float] = []  # of the backwards under way in this process: autograd runs hooks on threads of its own


@contextmanager
def scaled_by(factor: float) -> Iterator[None]:
    """A backward of a loss that was multiplied by ``factor``."""
    _factors.append(factor)
    try:
        yield
    finally:
        _factors.pop()


def factor_under_way() -> float:
    """Of the gradients that arrive now."""
    return _factors[-1] if _factors else 1.0
