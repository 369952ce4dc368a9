"""Requests with arrival times in seconds and prompts as token ids: what a live server is sent.

Lengths come from a trace, scaled down where a small machine is to serve it, and so do the token
ids of prompts, where it has them; arrivals are the trace's own, or a Poisson process of any rate.
At all rates the gaps are the same draws, stretched (common random numbers).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from paged_jax.config import MOST
from paged_jax.workload.trace import Trace
from pallas_kernels import dims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    """R requests of one output each, in the order of their arrival."""

    arrival_seconds_R: np.ndarray  # float64, from 0, never decreasing
    prompt_R: np.ndarray  # tokens
    output_R: np.ndarray  # tokens
    number_R: np.ndarray  # place in the trace

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        dims(**{name: getattr(self, name) for name in names})
        gaps_R = np.diff(self.arrival_seconds_R, prepend=0)
        if not ((gaps_R >= 0) & (self.arrival_seconds_R < MOST)).all():
            raise ValueError(
                f"arrival_seconds_R: expected times in order, from 0 and below {MOST} seconds"
            )
        for name in ("prompt_R", "output_R"):
            if not (getattr(self, name) >= 1).all():
                raise ValueError(f"{name}: expected at least 1 token each")

    @property
    def count(self) -> int:
        """R, the number of requests."""
        return len(self.prompt_R)


def from_trace(
    trace: Trace,
    *,
    limit: int | None = None,
    prompt_scale: float = 1.0,
    output_scale: float = 1.0,
    step_seconds: float | None = None,
) -> Timed:
    """The first ``limit`` requests of a trace at its own times, the first one at 0.

    Lengths are scaled and rounded, to 1 at least. Requests of a trace without times are all there
    at 0. ``step_seconds`` are those of a step where a trace's times are steps. Raises
    ``ValueError`` for a scale that is not above 0 and at most 1, and for ``step_seconds`` that are
    missing or have no effect.
    """
    for name, scale in (("prompt_scale", prompt_scale), ("output_scale", output_scale)):
        if not 0 < scale <= 1:
            raise ValueError(f"{name}: expected above 0 to 1, got {scale}")
    seconds_R = _seconds(trace, step_seconds)[:limit]
    return Timed(
        arrival_seconds_R=seconds_R - seconds_R[0],
        prompt_R=_scaled(trace.prompt_R[:limit], prompt_scale),
        output_R=_scaled(trace.output_R[:limit], output_scale),
        number_R=np.arange(len(seconds_R)),
    )


def within(timed: Timed, max_length: int) -> Timed:
    """The requests of at most ``max_length`` tokens of prompt and output, the first one at 0.

    Raises ``ValueError`` where there is none.
    """
    total_R = timed.prompt_R + timed.output_R
    fits_R = total_R <= max_length
    if not fits_R.any():
        raise ValueError(
            f"max_length: each of {timed.count} requests has more than {max_length} tokens of"
            f" prompt and output, the shortest {total_R.min()}"
        )
    fields = [field.name for field in dataclasses.fields(timed)]
    kept = {name: getattr(timed, name)[fits_R] for name in fields}
    kept["arrival_seconds_R"] = kept["arrival_seconds_R"] - kept["arrival_seconds_R"][0]
    return Timed(**kept)


def poisson(timed: Timed, rate: float, seed: int) -> Timed:
    """The same requests with exponential gaps of mean 1 / ``rate`` seconds, the first one at 0."""
    if not 0 < rate < math.inf:
        raise ValueError(f"rate: expected requests a second above 0, got {rate}")
    gap_R = np.random.default_rng(seed).standard_exponential(timed.count)
    gap_R[0] = 0
    return dataclasses.replace(timed, arrival_seconds_R=gap_R.cumsum() / rate)


def prompts(
    timed: Timed, trace: Trace, *, vocabulary: int, seed: int, prompt_scale: float = 1.0
) -> list[list[int]]:
    """Token ids of every prompt, each below ``vocabulary``.

    The trace's own, cut to length, modulo the vocabulary; or drawn for each of its prefix ids, so
    that prompts begin alike where the trace's do; or drawn, where it has neither.
    """
    tokens_an_id = math.ceil((trace.ids_tokens or 1) * prompt_scale)

    def prompt(number: int, length: int) -> np.ndarray:
        if trace.prompt_ids is not None:
            return trace.prompt_ids.row(number)[:length] % vocabulary
        if trace.ids is None:
            return _draw(seed, number, length, vocabulary)
        ids = trace.ids.row(number)[: -(-length // tokens_an_id)]
        drawn = [_draw(seed, int(one), tokens_an_id, vocabulary) for one in ids]
        return np.concatenate(drawn)[:length]

    pairs = zip(timed.number_R, timed.prompt_R, strict=True)
    return [prompt(int(number), int(length)).tolist() for number, length in pairs]


def outputs(timed: Timed, trace: Trace, *, vocabulary: int, seed: int) -> list[list[int]]:
    """Token ids of every output, where no model draws them: the trace's own, or drawn."""

    def output(number: int, length: int) -> np.ndarray:
        if trace.output_ids is not None:
            return trace.output_ids.row(number)[:length] % vocabulary
        return np.random.default_rng([seed, number, 1]).integers(vocabulary, size=length)

    pairs = zip(timed.number_R, timed.output_R, strict=True)
    return [output(int(number), int(length)).tolist() for number, length in pairs]


def _seconds(trace: Trace, step_seconds: float | None) -> np.ndarray:
    steps_R = trace.arrival_steps_R
    if steps_R is not None and steps_R.any():
        if step_seconds is None or not 0 < step_seconds < math.inf:
            raise ValueError(
                f"step_seconds: the trace's times are steps, expected the seconds of one,"
                f" got {step_seconds}"
            )
        return steps_R * step_seconds
    if step_seconds is not None:
        raise ValueError(f"step_seconds: no time of the trace is a step, got {step_seconds}")
    if trace.arrival_seconds_R is None:
        return np.zeros(trace.count)
    return trace.arrival_seconds_R


def _scaled(tokens_R: np.ndarray, scale: float) -> np.ndarray:
    return np.maximum(np.rint(tokens_R * scale).astype(np.int64), 1)


def _draw(seed: int, number: int, length: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng([seed, number]).integers(vocabulary, size=length)
