"""Arrival laws: the step from which each request may be admitted.

All but ``Saturated`` are renewal processes from step 0: independent gaps, added up and rounded
down, so that a request that arrives inside a step is seen by it. A gap has mean 1 / rate and
coefficient of variation ``cv`` (1 is the Poisson process, more comes in bursts).
The first k arrivals do not depend on how many are drawn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import numpy as np

_LATEST = int(np.iinfo(np.int32).max)


class Arrivals(Protocol):
    """A law of arrivals."""

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """``arrival_R``: int32 steps, never decreasing. ``ValueError`` beyond int32."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Saturated:
    """Everybody is waiting at step 0."""

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return np.zeros(count, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Exponential gaps."""

    rate: float  # requests a step

    def __post_init__(self) -> None:
        _demand_positive("rate", self.rate)

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        return _steps(generator.standard_exponential(count).cumsum() / self.rate)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Gamma gaps of shape 1 / cv ** 2."""

    rate: float
    cv: float  # 0.05 to 50

    def __post_init__(self) -> None:
        _demand_positive("rate", self.rate)
        _demand_cv(self.cv)

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        gap_R = generator.standard_gamma(self.cv**-2, count) * self.cv**2
        return _steps(gap_R.cumsum() / self.rate)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weibull:
    """Weibull gaps; the shape that has this ``cv`` is found by bisection."""

    rate: float
    cv: float  # 0.05 to 50

    def __post_init__(self) -> None:
        _demand_positive("rate", self.rate)
        _demand_cv(self.cv)

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        shape = weibull_shape(self.cv)
        gap_R = generator.standard_exponential(count) ** (1 / shape) / math.gamma(1 + 1 / shape)
        return _steps(gap_R.cumsum() / self.rate)


def in_steps(seconds_R: np.ndarray, step_seconds: float) -> np.ndarray:
    """``arrival_R``: the int32 step in which each time falls, at ``step_seconds`` a step."""
    _demand_positive("step_seconds", step_seconds)
    return _steps(seconds_R / step_seconds)


def weibull_shape(cv: float) -> float:
    """Shape k of the Weibull law with this coefficient of variation, which falls as k grows."""

    def excess(shape: float) -> float:
        ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
        return ratio - math.log1p(cv**2)

    low, high = 0.05, 50.0
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return middle


def _steps(time_R: np.ndarray) -> np.ndarray:
    if len(time_R) and time_R[-1] > _LATEST:
        raise ValueError(
            f"arrivals: the last comes at step {time_R[-1]:.3g}, the latest possible is {_LATEST}:"
            " raise the rate or the length of a step"
        )
    return np.floor(time_R).astype(np.int32)


def _demand_cv(cv: float) -> None:
    if not 0.05 <= cv <= 50:
        raise ValueError(f"cv: expected 0.05 to 50, got {cv}")


def _demand_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {value}")
