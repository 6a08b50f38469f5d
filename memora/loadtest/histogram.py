"""A high dynamic range histogram: any number of values in bounded memory, each within a thousandth of what it was.

Owns the buckets. Pure; must not know what is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

MICROSECOND: Final = 1e-6
_DIGITS: Final = 6

_EXACT: Final = 2_048
"""Below this many units every value has a bucket of its own; above, buckets double in width with every power of two."""


class Histogram:
    """Counts of non-negative values in a unit. Percentiles are the upper edge of their bucket, never above the largest.

    Seconds are counted in microseconds, what can be counted itself in ones.
    """

    def __init__(self, unit: float = MICROSECOND) -> None:
        self._unit = unit
        self._counts: Counter[int] = Counter()
        self.count = 0
        self.largest = 0.0

    def add(self, value: float) -> None:
        """Count one value; a negative one is 0."""
        value = max(value, 0.0)
        self._counts[_bucket(round(value / self._unit))] += 1
        self.count += 1
        self.largest = max(self.largest, value)

    def percentile(self, share: float) -> float:
        """The value that this share (0 to 1) of all values is not above; 0 if there are none."""
        for value, reached in self.steps():
            if reached >= share:
                return value
        return self.largest

    def steps(self) -> Iterator[tuple[float, float]]:
        """Every value that occurs, ascending, with the share of values that are not above it."""
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            yield min(_upper_edge(bucket) * self._unit, self.largest), seen / self.count

    def record(self) -> dict[str, float]:
        """The usual percentiles."""
        named = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        figures = {**{name: self.percentile(share) for name, share in named.items()}, "max": self.largest}
        return {name: round(value, _DIGITS) for name, value in figures.items()}


def _bucket(units: int) -> int:
    """A number for the bucket, ascending with the value."""
    shift = max(units.bit_length() - _EXACT.bit_length() + 1, 0)
    return (shift << _EXACT.bit_length()) + (units >> shift)


def _upper_edge(bucket: int) -> int:
    shift, rest = bucket >> _EXACT.bit_length(), bucket & ((1 << _EXACT.bit_length()) - 1)
    return ((rest + 1) << shift) - 1
