"""Numbers with the doubt they deserve: percentiles, shares and differences with confidence bounds, without distributional guesses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
Z, Z_99 = 1.959964, 2.575829  # two-sided 95 and 99 %
RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A number and the interval it lies in with 95 % confidence."""

    value: float
    low: float
    high: float
    count: int


def percentile(values: Sequence[float], q: float) -> Estimate:
    """The q-quantile (0 < q < 1) with bounds from order statistics; a bound no sample supports is infinite. Needs one value."""
    ordered = sorted(values)
    n = len(ordered)
    value = ordered[min(n - 1, math.ceil(q * n) - 1)]
    tail = (1 - CONFIDENCE) / 2
    # P(B <= k) for B ~ Binomial(n, q): the number of samples below the true quantile.
    cumulative, low, high = 0.0, 0, n
    found_low = False
    for k in range(n + 1):
        cumulative += _binomial(n, k, q)
        if not found_low and cumulative > tail:
            low, found_low = k, True
        if cumulative >= 1 - tail:
            high = k
            break
    return Estimate(value, ordered[low - 1] if low >= 1 else -math.inf, ordered[high] if high < n else math.inf, n)


def _binomial(n: int, k: int, q: float) -> float:
    return math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(q) + (n - k) * math.log(1 - q))


def share(part: int, whole: int, z: float = Z) -> Estimate:
    """part/whole with Wilson's interval. Needs whole > 0."""
    p, n = part / whole, whole
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Estimate(p, min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half)), n)


def difference_of_shares(first: tuple[int, int], second: tuple[int, int]) -> Estimate:
    """second minus first, each (part, whole), with Newcombe's interval at 99 %."""
    a, b = share(*first, z=Z_99), share(*second, z=Z_99)
    value = b.value - a.value
    low = value - math.sqrt((b.value - b.low) ** 2 + (a.high - a.value) ** 2)
    high = value + math.sqrt((b.high - b.value) ** 2 + (a.value - a.low) ** 2)
    return Estimate(value, low, high, a.count + b.count)


def difference(first: Sequence[float], second: Sequence[float], of: Callable[[Sequence[float]], float], seed: int = 0) -> Estimate:
    """of(second) minus of(first), 99 % bounds by the bootstrap (seeded: the same data, the same bounds). Needs a value in each."""
    rng = random.Random(seed)
    seen = sorted(of(rng.choices(second, k=len(second))) - of(rng.choices(first, k=len(first))) for _ in range(RESAMPLES))
    cut = int(RESAMPLES * 0.01 / 2)
    return Estimate(of(second) - of(first), seen[cut], seen[-1 - cut], len(first) + len(second))


def needed_for(q: float) -> int:
    """How many samples a 95 % upper bound of the q-quantile needs at the least."""
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(q))
