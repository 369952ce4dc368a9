"""Mean, standard deviation and 95 % confidence half-width of a few repeats.

half-width = t sd / sqrt(n) with Student's t for n - 1 degrees of freedom. For an integer number
of degrees v the distribution is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4): with
a = atan(t / sqrt(v)), c = cos a, s = sin a,

    P(|T| < t) = s (1 + 1/2 c^2 + 1·3/(2·4) c^4 + ... c^(v-2))                      v even
               = 2/pi (a + s (c + 2/3 c^3 + 2·4/(3·5) c^5 + ... c^(v-2)))           v odd

and rises with a, so bisection inverts it to the last bit. Cost: v terms a halving.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Repeats in four numbers; ``sd`` and ``half_width`` are nan for a single one."""

    count: int
    mean: float
    sd: float  # of the sample: divided by count - 1
    half_width: float  # of the 95 % confidence interval around the mean

    def text(self, decimals: int) -> str:
        """``mean ±half_width``, or the mean alone of a single repeat."""
        mean = f"{self.mean:.{decimals}f}"
        return mean if self.count == 1 else f"{mean} ±{self.half_width:.{decimals}f}"


def summarize(values: Iterable[float]) -> Summary:
    """Summary of repeats that differ in nothing but the seed.

    Raises ``ValueError`` when there are none.
    """
    repeats = [float(value) for value in values]
    count = len(repeats)
    if count == 0:
        raise ValueError("values: expected at least one repeat, got none")
    mean = sum(repeats) / count
    if count == 1:
        return Summary(count=1, mean=mean, sd=math.nan, half_width=math.nan)
    sd = statistics.stdev(repeats) if all(map(math.isfinite, repeats)) else math.nan
    half_width = student_t(count - 1) * sd / math.sqrt(count)
    return Summary(count=count, mean=mean, sd=sd, half_width=half_width)


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """The t for which ``P(|T| < t) = confidence`` at ``degrees`` degrees of freedom.

    Raises ``ValueError`` unless degrees >= 1 and 0 < confidence < 1.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise ValueError(f"expected degrees >= 1, 0 < confidence < 1; got {degrees}, {confidence}")
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = total = 0.0 if degrees == 1 else cosine if odd else 1.0
    for power in range(2 + odd, degrees - 1, 2):
        term *= (power - 1) / power * cosine**2
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
