"""Seconds that a job takes as a function of its size, from measurements at some sizes."""

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Measured ``points`` (size, seconds), with positive, increasing sizes.

    Between points, logarithms are interpolated linearly. A job below the smallest size takes as long as the smallest;
    one above the largest size runs at the rate of the largest.
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Return the seconds that one job of this size takes."""
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
        """The highest measured rate, in size per second."""
        return max(size / seconds for size, seconds in self.points)
