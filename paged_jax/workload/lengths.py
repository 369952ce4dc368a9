"""Length laws: prompts and outputs drawn by inverting their distribution functions.

A marginal law is its quantile function: ``quantile(level)`` is the length below which a share
``level`` of the requests lies. So any two laws can be coupled without changing either: a Gaussian
copula bends the levels alone, and ``correlation`` is the rank (Spearman) correlation of the
levels, r = 2 sin(pi correlation / 6) being the correlation of the normal pair (Pearson, 1907).

``sharegpt`` and ``alpaca`` are the histograms of Fig. 11 of the PagedAttention paper (Kwon et al.,
SOSP 2023; 128 equal bins, counts read from the vector graphics). The pairing of prompts with
outputs was not published; independence is an assumption. Drawing costs one binary search a
length; the copula about a microsecond more, and nothing at 0.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
import statistics
from collections.abc import Callable
from typing import Protocol

import numpy as np

_STEPS = 2**52  # levels are odd multiples of 1 / (2 * _STEPS): never 0, never 1, exact in float64


class Marginal(Protocol):
    """A law of one length."""

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        """Lengths [R, F] in tokens, int64, at levels strictly between 0 and 1."""
        ...


class Law(Protocol):
    """A joint law of prompt and output lengths."""

    def draw(
        self,
        generator: np.random.Generator,
        count: int,
        *,
        correlation: float = 0.0,
        samples: int = 1,
    ) -> tuple[np.ndarray, np.ndarray]:
        """``prompt_R`` and ``output_RF``, int64 tokens; F = ``samples``, each its own draw.

        The first k requests depend on neither ``count`` nor ``samples`` (but for the added F).
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Always the same length."""

    tokens: int

    def __post_init__(self) -> None:
        _demand(self.tokens >= 1, f"tokens: expected at least 1, got {self.tokens}")

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        return np.full(np.shape(level_RF), self.tokens, np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Uniform:
    """Every length from ``low`` to ``high``, both included, is equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _demand_support(self.low, self.high)

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        return self.low + (level_RF * (self.high - self.low + 1)).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Rounded up, so that P(length <= k) is the continuous law's at every whole k."""

    median: float
    sigma: float  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        _demand(self.median > 0, f"median: expected more than 0, got {self.median}")
        _demand(self.sigma >= 0, f"sigma: expected at least 0, got {self.sigma}")
        widest = math.log(self.median) + 8.3 * self.sigma  # the last level is at 8.29 sigma
        _demand(widest < 43, f"sigma: expected lengths below 2**62, got sigma {self.sigma}")

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        normal_RF = _each(statistics.NormalDist().inv_cdf, level_RF)
        return np.ceil(self.median * np.exp(self.sigma * normal_RF)).astype(np.int64)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """P(length) proportional to length ** -exponent on ``low`` to ``high``, both included."""

    exponent: float
    low: int
    high: int

    def __post_init__(self) -> None:
        _demand_support(self.low, self.high)
        _demand(0 <= self.exponent <= 16, f"exponent: expected 0 to 16, got {self.exponent}")

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        value_V = np.arange(self.low, self.high + 1)
        return value_V[_pick((value_V / self.low) ** -self.exponent, level_RF)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Discrete:
    """Value ``values[v]`` with a probability proportional to ``weights[v]``; values in order."""

    values: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        _demand(
            len(self.values) == len(self.weights) > 0,
            f"weights: expected one for each of {len(self.values)} values, got {len(self.weights)}",
        )
        in_order = all(
            low < high for low, high in zip((0, *self.values), self.values, strict=False)
        )
        _demand(in_order, "values: expected lengths from 1 in increasing order")
        weighted = min(self.weights) >= 0 and 0 < sum(self.weights) < math.inf
        _demand(weighted, "weights: expected none below 0 and a positive finite sum")

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        return np.array(self.values, np.int64)[_pick(np.array(self.weights), level_RF)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A bin in proportion to its count, then a whole length of the bin, all equally likely.

    The bins cut ``low`` to ``high`` into equal parts, each without its upper edge but the last.
    """

    low: int
    high: int
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        _demand_support(self.low, self.high)
        bins = len(self.counts)
        _demand(0 < bins <= self.high - self.low, f"counts: {bins} bins are narrower than a token")
        _demand(
            min(self.counts) >= 0 < sum(self.counts), "counts: expected a positive sum, none < 0"
        )

    def quantile(self, level_RF: np.ndarray) -> np.ndarray:
        value_V = np.arange(self.low, self.high + 1)
        bins = len(self.counts)
        # Whole-number arithmetic: no edge is lost to rounding. The last bin holds ``high`` too.
        bin_V = np.minimum((value_V - self.low) * bins // (self.high - self.low), bins - 1)
        weight_V = (np.array(self.counts) / np.bincount(bin_V))[bin_V]
        return value_V[_pick(weight_V, level_RF)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt law and an output law, independent unless a draw asks for a correlation."""

    prompt: Marginal
    output: Marginal

    def draw(
        self,
        generator: np.random.Generator,
        count: int,
        *,
        correlation: float = 0.0,
        samples: int = 1,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See ``Law.draw``. The prompts are the same whatever the correlation (-1 to 1)."""
        prompt_level_RF, output_level_RF = _levels(generator, count, samples)
        output_level_RF = couple(prompt_level_RF, output_level_RF, correlation)
        prompt_RF = self.prompt.quantile(prompt_level_RF)
        return prompt_RF[:, 0], self.output.quantile(output_level_RF)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Empirical:
    """Requests of a trace drawn with replacement, each prompt with its own output."""

    prompt_R: np.ndarray
    output_R: np.ndarray

    def __post_init__(self) -> None:
        sizes = len(self.prompt_R), len(self.output_R)
        _demand(sizes[0] == sizes[1] > 0, f"expected as many prompts as outputs, got {sizes}")

    def draw(
        self,
        generator: np.random.Generator,
        count: int,
        *,
        correlation: float = 0.0,
        samples: int = 1,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See ``Law.draw``; ``ValueError`` for a correlation or samples that no trace tells of."""
        _demand(
            correlation == 0, f"correlation: a trace has its own, expected 0, got {correlation}"
        )
        _demand(samples == 1, f"samples: a trace has one output a prompt, got {samples}")
        level_RF, _ = _levels(generator, count, samples)
        index_R = (level_RF[:, 0] * len(self.prompt_R)).astype(np.int64)
        return self.prompt_R[index_R], self.output_R[index_R][:, None]


@functools.cache
def sharegpt() -> Pair:
    """ShareGPT of Fig. 11: 79,731 conversations, mean prompt 161.31 and output 337.99 tokens."""
    return _figure_11("sharegpt")


@functools.cache
def alpaca() -> Pair:
    """Alpaca of Fig. 11: 52,002 instructions, mean prompt 19.31 and output 58.45 tokens."""
    return _figure_11("alpaca")


def couple(
    prompt_level_RF: np.ndarray, output_level_RF: np.ndarray, correlation: float
) -> np.ndarray:
    """Output levels [R, F], still uniform, so correlated in rank to the prompt levels [R, 1]."""
    _demand(-1 <= correlation <= 1, f"correlation: expected -1 to 1, got {correlation}")
    if correlation == 0:
        return output_level_RF
    normal = statistics.NormalDist()
    slope = 2 * math.sin(math.pi * correlation / 6)
    spread = math.sqrt(max(0.0, 1 - slope**2))  # slope rounds to 1 or just below it
    coupled_RF = slope * _each(normal.inv_cdf, prompt_level_RF)
    coupled_RF = coupled_RF + spread * _each(normal.inv_cdf, output_level_RF)
    # The last level before 1 may round to 1 on its way through the normal law and back.
    return np.clip(_each(normal.cdf, coupled_RF), 0.5 / _STEPS, 1 - 0.5 / _STEPS)


def cut(
    prompt_R: np.ndarray, output_RF: np.ndarray, max_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths that fit a model: prompt <= max_length - 1, output <= max_length - prompt.

    The treatment under which the histograms reproduce the published memory breakdown: long
    requests are shortened, none is dropped. Returns the prompts, the outputs, and ``cut_R``: int32,
    1 for each request that was shortened. Nothing else in this package bounds a length.
    """
    _demand(max_length >= 2, f"max_length: expected at least 2, got {max_length}")
    short_prompt_R = np.minimum(prompt_R, max_length - 1)
    short_output_RF = np.minimum(output_RF, (max_length - short_prompt_R)[:, None])
    cut_R = (short_prompt_R < prompt_R) | (short_output_RF < output_RF).any(axis=1)
    return short_prompt_R, short_output_RF, cut_R.astype(np.int32)


def _levels(
    generator: np.random.Generator, count: int, samples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Uniform levels, prompts [R, 1] and outputs [R, F]; further samples have their own stream."""
    _demand(samples >= 1, f"samples: expected at least 1, got {samples}")
    (others,) = generator.spawn(1)
    first_RF = (generator.integers(_STEPS, size=(count, 2)) + 0.5) / _STEPS
    other_RF = (others.integers(_STEPS, size=(count, samples - 1)) + 0.5) / _STEPS
    return first_RF[:, :1], np.hstack([first_RF[:, 1:], other_RF])


def _pick(weight_V: np.ndarray, level_RF: np.ndarray) -> np.ndarray:
    """Index into V of each level: the first where the share of weight so far exceeds the level."""
    cumulative_V = np.cumsum(weight_V)
    return np.searchsorted(cumulative_V / cumulative_V[-1], level_RF, side="right")


def _each(function: Callable[[float], float], array_RF: np.ndarray) -> np.ndarray:
    values = map(function, array_RF.ravel().tolist())
    return np.fromiter(values, np.float64, array_RF.size).reshape(array_RF.shape)


def _figure_11(name: str) -> Pair:
    text = importlib.resources.files(__package__).joinpath("data/fig11_histograms.json").read_text()
    data = json.loads(text)[name]

    def histogram(side: str) -> Histogram:
        entry = data[side]
        return Histogram(low=entry["lo"], high=entry["hi"], counts=tuple(entry["counts"]))

    return Pair(prompt=histogram("input"), output=histogram("output"))


def _demand_support(low: int, high: int) -> None:
    _demand(1 <= low <= high, f"low, high: expected 1 <= low <= high, got {low}, {high}")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
