"""Compile time and run time of a function, apart.

Compilation is timed ahead of time, so that it never leaks into a run; one run warms up; then
each repeat is timed until its results are ready, since JAX returns before the work is done. The
median is reported: a shared machine delays some repeats and speeds none up. What is compared is
timed in turn, so that a slow minute of the machine falls on all alike.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds to compile (tracing included), and the median and the least seconds of a run."""

    compile_seconds: float
    run_seconds: float
    fastest_seconds: float


def compile_and_time(function: Callable[..., object], *args: object, repeats: int = 5) -> Timing:
    """Timing of ``function(*args)`` under jit; every argument is traced, none may be donated.

    Raises ``ValueError`` when ``repeats`` is less than 1.
    """
    run, compile_seconds = compile_run(function, *args)
    (seconds,) = time_in_turn([run], repeats=repeats)
    return summarize(seconds, compile_seconds)


def compile_run(
    function: Callable[..., object], *args: object
) -> tuple[Callable[[], object], float]:
    """A run of ``function(*args)``, compiled and warmed up, and the seconds to compile it."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_seconds = time.perf_counter() - start
    jax.block_until_ready(compiled(*args))
    return lambda: compiled(*args), compile_seconds


def time_in_turn(
    runs: Sequence[Callable[[], object]],
    *,
    repeats: int,
    before: Callable[[], object] | None = None,
) -> list[list[float]]:
    """Seconds of every repeat of every run, one repeat of each before the next of any.

    ``before`` runs to its end ahead of each and is not timed: it may empty the caches. Raises
    ``ValueError`` when ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, seconds, strict=True):
            if before is not None:
                jax.block_until_ready(before())
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
    return seconds


def summarize(seconds: Sequence[float], compile_seconds: float) -> Timing:
    """Timing of repeats."""
    return Timing(
        compile_seconds=compile_seconds,
        run_seconds=statistics.median(seconds),
        fastest_seconds=min(seconds),
    )
