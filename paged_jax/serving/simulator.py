"""A run of requests through a memory in virtual time, the whole of it in one ``lax.while_loop``.

Here are only the clock and the record: ``scheduling`` decides, ``memory`` carries out. On CPU XLA
compiles the loop to one native function, which a test asserts. All settings but array sizes are
traced, so one program serves every block size, pool, seed and workload of a sweep. Sums over
steps are exact: they are kept in two 30-bit halves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.config import MOST, Bounds, PoolConfig
from paged_jax.memory import allocators, ledger
from paged_jax.memory.verbs import Memory
from paged_jax.scheduling import policy
from paged_jax.scheduling import queue as queues
from paged_jax.workload import arrays
from paged_jax.workload.requests import Requests

# What a run records in every step: the ledger in slots, sequences and requests that run, table
# entries and blocks in use, and what happened in the step.
COUNTS = ("rows", "requests", "entries", "used", "preemptions", "copies", "finished")
METRICS = ledger.CATEGORIES + COUNTS
HALF_BITS = 30


class NeverFitsError(ValueError):
    """A request could not run even alone: the message has its number and what it needs."""


class Clock(flax.struct.PyTreeNode):
    """When to record and when to stop."""

    warmup_steps: jax.Array  # i32: steps that come before the record
    steps: jax.Array  # i32: steps to record at most
    skips_idle: jax.Array  # bool: jump to the next arrival when nobody runs


class Run(flax.struct.PyTreeNode):
    """The state of a run; sums begin after the warm-up, series with the first step."""

    queue: queues.Queue
    memory: Any
    step: jax.Array  # i32: virtual time
    elapsed: jax.Array  # i32: steps done, idle ones that were skipped left out
    high_J: jax.Array  # i32: sums of METRICS, in units of 2^30
    low_J: jax.Array  # i32: the rest of the sums
    series: dict[str, jax.Array]  # i32 arrays, one value a step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished run on the host."""

    sums: dict[str, int]  # of each of METRICS over the recorded steps
    steps: int  # recorded
    series: dict[str, np.ndarray]  # one value a step, the warm-up included
    exhausted: bool  # every request was admitted
    run: Run  # the final state

    def mean(self, metric: str) -> float:
        """Average of a metric over the recorded steps."""
        return self.sums[metric] / self.steps


def bounds_of(requests: Requests, config: PoolConfig) -> Bounds:
    """The smallest bounds that serve one run."""
    return Bounds(
        requests=requests.count,
        output=int(requests.output_RF.max()),
        blocks=max(config.blocks, 1),
        block_size=config.block_size,
        slots=config.pool_slots,
    )


def on_cpu() -> contextlib.AbstractContextManager:
    """Where simulations belong: a scalar loop is native code on CPU, and slow elsewhere."""
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def simulate(
    requests: Requests,
    allocator: allocators.Scheme,
    config: PoolConfig,
    *,
    steps: int,
    warmup_steps: int = 0,
    limits: policy.Limits | None = None,
    skips_idle: bool = False,
    series: tuple[str, ...] = (),
    bounds: Bounds | None = None,
    work: arrays.RequestArrays | None = None,
) -> Result:
    """Runs ``requests`` until they are done, or for ``warmup_steps`` + ``steps`` steps.

    Args:
      requests: what arrives; ``NeverFitsError`` if one of them could not run even alone.
      allocator: an entry of ``allocators.ALLOCATORS``.
      config: the pool.
      steps: steps to record at most, after ``warmup_steps``.
      limits: settings of the rules; default: no watermark, no limit on rows.
      skips_idle: whether the clock jumps to the next arrival while nobody runs.
      series: the metrics to keep for every step.
      bounds: array sizes of the program; default: those of this run.
      work: ``arrays.put(requests, bounds.requests)`` made ``on_cpu``, if there already.
    """
    limits = limits or policy.limits()
    bounds = bounds or bounds_of(requests, config)
    if steps < 1 or warmup_steps < 0 or steps + warmup_steps >= MOST:
        raise ValueError(f"steps: expected at least 1, with the warm-up below {MOST}, got {steps}")
    if requests.samples > int(limits.rows):
        raise NeverFitsError(
            f"a request has {requests.samples} samples, at most {int(limits.rows)} rows may run"
        )
    if refusal := allocator.refusal(requests, config):
        raise NeverFitsError(refusal)
    _demand_bounds(bounds, bounds_of(requests, config), allocator)
    with on_cpu():
        work = work or arrays.put(requests, bounds.requests)
        clock = Clock(jnp.int32(warmup_steps), jnp.int32(steps), jnp.bool_(skips_idle))
        final = run(
            work,
            allocator.create(work, config, bounds),
            clock,
            limits,
            verbs=allocator.verbs,
            output_bound=bounds.output,
            series=series,
            series_bound=warmup_steps + steps if series else 0,
        )
        return collect(final, work, clock)


def _demand_bounds(bounds: Bounds, needed: Bounds, allocator: allocators.Scheme) -> None:
    """Arrays that are too small would lose writes in silence."""
    sizes = ("blocks", "block_size") if allocator.has_blocks else ("slots",)
    for name in ("requests", "output", *sizes):
        bound, need = getattr(bounds, name), getattr(needed, name)
        if bound < need:
            raise ValueError(f"bounds.{name}: expected at least {need}, got {bound}")


def collect(final: Run, work: arrays.RequestArrays, clock: Clock) -> Result:
    """A run's results as Python integers and NumPy arrays."""
    high_J, low_J, series = jax.device_get((final.high_J, final.low_J, final.series))
    elapsed, warmup_steps = int(final.elapsed), int(clock.warmup_steps)
    sums = (high_J.astype(np.int64) << HALF_BITS) + low_J
    return Result(
        sums=dict(zip(METRICS, sums.tolist(), strict=True)),
        steps=max(elapsed - warmup_steps, 0),
        series={name: values[:elapsed] for name, values in series.items()},
        exhausted=int(final.queue.waiting) >= int(work.count),
        run=final,
    )


@functools.partial(jax.jit, static_argnames=("verbs", "output_bound", "series", "series_bound"))
def run(
    work: arrays.RequestArrays,
    memory: Any,
    clock: Clock,
    limits: policy.Limits,
    *,
    verbs: Memory,
    output_bound: int,
    series: tuple[str, ...] = (),
    series_bound: int = 0,
) -> Run:
    """The loop. Ends when the clock says so, or when every request is done."""

    def goes_on(state: Run) -> jax.Array:
        done = (state.queue.requests == 0) & (state.queue.waiting >= work.bound)
        return (state.elapsed < clock.warmup_steps + clock.steps) & ~done

    def advance(state: Run) -> Run:
        before = state
        state, values = record(state, work, limits, verbs)
        state = retire(state, work, clock, verbs)
        values["finished"] = state.queue.finished - before.queue.finished
        return _write(state, values, counted=before.elapsed >= clock.warmup_steps)

    start = begin(
        work, memory, clock, output_bound=output_bound, series=series, series_bound=series_bound
    )
    return lax.while_loop(goes_on, advance, start)


def begin(
    work: arrays.RequestArrays,
    memory: Any,
    clock: Clock,
    *,
    output_bound: int,
    series: tuple[str, ...] = (),
    series_bound: int = 0,
) -> Run:
    """Before the first step."""
    zeros_J = jnp.zeros(len(METRICS), jnp.int32)
    return Run(
        queue=queues.create(work, output_bound),
        memory=memory,
        step=jnp.where(clock.skips_idle, work.arrival_R[0], 0),
        elapsed=jnp.int32(0),
        high_J=zeros_J,
        low_J=zeros_J,
        series={name: jnp.zeros(series_bound, jnp.int32) for name in series},
    )


def record(
    state: Run, work: arrays.RequestArrays, limits: policy.Limits, verbs: Memory
) -> tuple[Run, dict[str, jax.Array]]:
    """A step up to its moment of record. Returns ``(state', metrics but ``finished``)``."""
    queue, memory, verdict = queues.advance(
        state.queue, state.memory, state.step, work=work, limits=limits, verbs=verbs
    )
    slots = verbs.ledger(memory, short=verdict == policy.SHORT, stranded=verdict == policy.STRANDED)
    held = verbs.holdings(memory)
    values = {name: getattr(slots, name) for name in ledger.CATEGORIES} | {
        "rows": queue.rows,
        "requests": queue.requests,
        "entries": held.entries,
        "used": held.used,
        "preemptions": queue.preemptions - state.queue.preemptions,
        "copies": held.copies - verbs.holdings(state.memory).copies,
    }
    return state.replace(queue=queue, memory=memory), values


def retire(state: Run, work: arrays.RequestArrays, clock: Clock, verbs: Memory) -> Run:
    """The end of a step: rows finish, the clock moves on."""
    queue, memory = queues.retire(state.queue, state.memory, state.step, work=work, verbs=verbs)
    arrival = work.arrival_R[jnp.minimum(queue.waiting, work.bound - 1)]
    idle = (queue.requests == 0) & (queue.waiting < work.bound)
    step = state.step + 1
    return state.replace(
        queue=queue,
        memory=memory,
        step=jnp.where(clock.skips_idle & idle, jnp.maximum(step, arrival), step),
    )


def _write(state: Run, values: dict[str, jax.Array], *, counted: jax.Array) -> Run:
    value_J = jnp.stack([values[name] for name in METRICS])
    low_J = state.low_J + jnp.where(counted, value_J, 0)
    return state.replace(
        elapsed=state.elapsed + 1,
        high_J=state.high_J + (low_J >> HALF_BITS),
        low_J=low_J & (2**HALF_BITS - 1),
        series={
            name: array.at[state.elapsed].set(values[name]) for name, array in state.series.items()
        },
    )
