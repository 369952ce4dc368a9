"""What became of a trace's requests: times of each, and what ran, waited and was held step by step.

The engine in wall-clock time (``trace_run``) and the simulation in virtual time (``virtual_run``)
both return it, and everything that is reported is computed here. Times are seconds since the first
arrival. The quantity of the field is a request's normalised latency, its time from arrival to last
token over its output tokens (PagedAttention, section 6.1).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from paged_jax.memory.ledger import CATEGORIES
from paged_jax.memory.prefix_hits import HitRates
from paged_jax.workload.timed import Timed
from pallas_kernels import dims

NEVER = -1  # the step of what has not happened


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """X forward passes, in their order."""

    seconds_X: np.ndarray  # when it ended
    running_X: np.ndarray  # rows that are served
    waiting_X: np.ndarray  # requests that have arrived and are not: new ones, and preempted ones
    ledger_XJ: np.ndarray  # slots by ``ledger.CATEGORIES``
    host_XJ: np.ndarray  # the same of host memory; zeros without any

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        dims(**{name: getattr(self, name) for name in names})

    @property
    def used_X(self) -> np.ndarray:
        """Fraction of the pool that rows hold."""
        return _held(self.ledger_XJ)

    @property
    def host_used_X(self) -> np.ndarray:
        """Fraction of host memory that requests hold which wait there."""
        return _held(self.host_XJ)

    def slots(self, category: str) -> np.ndarray:
        """Slots of one category in each step, [X]."""
        return self.ledger_XJ[:, CATEGORIES.index(category)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """R requests as they were served; NaN where one was not."""

    requests: Timed
    start_seconds_R: np.ndarray  # when the step began that computed the first of its tokens
    first_seconds_R: np.ndarray  # when its first output token was there
    finish_seconds_R: np.ndarray  # when its last one was
    finish_step_R: np.ndarray  # the step that drew its last output token; NEVER
    token_ids: list[list[int]]  # what each drew; empty where no model draws
    refused: dict[int, str]  # why a request could not be served
    steps: Steps
    preemptions: int
    swaps: int  # of those, how many waited in host memory
    hits: HitRates | None  # of requests that came for the first time; None without a prefix cache

    @property
    def served_R(self) -> np.ndarray:
        """Which requests were served."""
        return ~np.isnan(self.finish_seconds_R)

    @property
    def queue_seconds_R(self) -> np.ndarray:
        """From arrival until it was first taken in."""
        return self.start_seconds_R - self.requests.arrival_seconds_R

    @property
    def latency_seconds_R(self) -> np.ndarray:
        """From arrival to the last token."""
        return self.finish_seconds_R - self.requests.arrival_seconds_R

    @property
    def normalised_latency_R(self) -> np.ndarray:
        """Seconds for each output token."""
        return self.latency_seconds_R / self.requests.output_R


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse:
    """How far a run has come."""

    seconds: float
    finished: int  # requests that need no more, refused ones among them
    tokens: int  # drawn
    used: float  # fraction of the pool


METRICS: tuple[tuple[str, str], ...] = (
    ("normalised_latency_mean", "s/token"),
    ("normalised_latency_p50", "s/token"),
    ("normalised_latency_p99", "s/token"),
    ("first_token_mean", "s"),
    ("first_token_p50", "s"),
    ("first_token_p99", "s"),
    ("queue_mean", "s"),
    ("seconds", "s"),
    ("output_tokens_per_second", "1/s"),
    ("requests_per_second", "1/s"),
    ("served", "requests"),
    ("refused", "requests"),
    ("preemptions", "requests"),
    ("swaps", "requests"),
    ("steps", "steps"),
    ("hit_blocks", "of blocks"),
    ("hit_tokens", "of tokens"),
    ("hit_requests", "mean of requests"),
    ("running_mean", "rows"),
    ("waiting_mean", "requests"),
    *((f"{name}_fraction", "of pool") for name in CATEGORIES),
)


def measures(result: Served) -> dict[str, float]:
    """The value of every one of ``METRICS``.

    Throughput counts the output tokens of requests, from the first arrival to the last token;
    ledger, running and waiting are means over steps. Hit rates, in the three definitions of
    ``prefix_hits``, are NaN without a prefix cache.
    """
    served_R, steps = result.served_R, result.steps
    first_R = (result.first_seconds_R - result.requests.arrival_seconds_R)[served_R]
    latency_R = result.normalised_latency_R[served_R]
    seconds = float(np.nanmax(result.finish_seconds_R))
    values: dict[str, float] = {
        **_spread("normalised_latency", latency_R),
        **_spread("first_token", first_R),
        "queue_mean": float(result.queue_seconds_R[served_R].mean()),
        "seconds": seconds,
        "output_tokens_per_second": int(result.requests.output_R[served_R].sum()) / seconds,
        "requests_per_second": int(served_R.sum()) / seconds,
        "served": int(served_R.sum()),
        "refused": len(result.refused),
        "preemptions": result.preemptions,
        "swaps": result.swaps,
        "steps": len(steps.seconds_X),
        "hit_blocks": result.hits.blocks if result.hits else math.nan,
        "hit_tokens": result.hits.tokens if result.hits else math.nan,
        "hit_requests": result.hits.requests if result.hits else math.nan,
        "running_mean": float(steps.running_X.mean()),
        "waiting_mean": float(steps.waiting_X.mean()),
    }
    pool_slots = steps.ledger_XJ[0].sum()
    for name in CATEGORIES:
        values[f"{name}_fraction"] = float(steps.slots(name).mean() / pool_slots)
    return values


def _held(ledger_XJ: np.ndarray) -> np.ndarray:
    held = [CATEGORIES.index(name) for name in ("token", "reserved", "internal")]
    return ledger_XJ[:, held].sum(axis=1) / np.maximum(ledger_XJ.sum(axis=1), 1)


def _spread(name: str, value_R: np.ndarray) -> dict[str, float]:
    return {
        f"{name}_mean": float(value_R.mean()),
        f"{name}_p50": float(np.percentile(value_R, 50)),
        f"{name}_p99": float(np.percentile(value_R, 99)),
    }
