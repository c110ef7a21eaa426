"""Seconds that a job takes by its size, as they were measured at some sizes."""

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """``points`` are (size, seconds), sizes above 0 and rising. Between them, logarithms are interpolated; a smaller
    job takes as long as the smallest, a larger one has the rate of the largest.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Of one job."""
        sizes = [each for each, _ in self.points]
        at = bisect_left(sizes, size)
        if at == 0:
            return self.points[0][1]
        if at == len(sizes):
            return self.points[-1][1] * size / sizes[-1]
        (low, low_s), (high, high_s) = self.points[at - 1 : at + 1]
        share = math.log(size / low) / math.log(high / low)
        return float(low_s * (high_s / low_s) ** share)

    @property
    def best_rate(self) -> float:
        """Of size in a second."""
        return max(size / seconds for size, seconds in self.points)
