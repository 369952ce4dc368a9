"""Compile time and run time of a function, apart.

Compilation is timed ahead of time, so that it never leaks into a run; one run warms up; then
each repeat is timed until its results are ready, since JAX returns before the work is done. The
median is reported: a shared machine delays some repeats and speeds none up.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds to compile (tracing included), and the median seconds of a run."""

    compile_seconds: float
    run_seconds: float


def compile_and_time(function: Callable[..., object], *args: object, repeats: int = 5) -> Timing:
    """Timing of ``function(*args)`` under jit; every argument is traced, none may be donated.

    Raises ``ValueError`` when ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_seconds = time.perf_counter() - start
    jax.block_until_ready(compiled(*args))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    return Timing(compile_seconds=compile_seconds, run_seconds=statistics.median(seconds))
