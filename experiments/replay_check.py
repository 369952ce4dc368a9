"""The simulator beside a list allocator, block by block, in every iteration of a replay trace."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import PoolConfig
from paged_jax.measure import progress
from paged_jax.measure.list_allocator import ListAllocator
from paged_jax.memory import paged
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import Requests, arrays


def check(
    requests: Requests,
    result: simulator.Result,
    *,
    config: PoolConfig,
    limits: policy.Limits,
) -> float:
    """Compares both at every iteration, and times the list allocator alone.

    Returns its iterations a second. Raises ``ValueError`` at the first difference in a
    series of ``result``, a row's table up to renaming of blocks, or a reference count.
    """

    def fresh() -> ListAllocator:
        triples = zip(
            requests.arrival_R.tolist(),
            requests.prompt_R.tolist(),
            requests.output_RF[:, 0].tolist(),
            strict=True,
        )
        return ListAllocator(
            list(triples),
            blocks=config.blocks,
            block_size=config.block_size,
            watermark_blocks=int(limits.watermark),
            max_rows=int(limits.rows),
        )

    began = time.perf_counter()
    series = list(fresh())
    seconds = time.perf_counter() - began
    names = ("rows", "used", "token")
    for name, values in zip(names, zip(*series, strict=True), strict=True):
        ours = result.series[name]
        if len(ours) != len(values) or (ours != values).any():
            raise ValueError(f"check: the series {name} differs from the list allocator's")
    _compare_tables(requests, fresh(), len(series), config=config, limits=limits)
    return len(series) / seconds


def _compare_tables(
    requests: Requests,
    reference: ListAllocator,
    iterations: int,
    *,
    config: PoolConfig,
    limits: policy.Limits,
) -> None:
    with simulator.on_cpu():
        work = arrays.put(requests)
        bounds = simulator.bounds_of(requests, config)
        clock = simulator.Clock(jnp.int32(0), jnp.int32(iterations), jnp.bool_(True))
        record = jax.jit(functools.partial(simulator.record, verbs=paged))
        retire = jax.jit(functools.partial(simulator.retire, verbs=paged))
        memory = ALLOCATORS["paged"].create(work, config, bounds)
        state = simulator.begin(work, memory, clock, output_bound=bounds.output)
        with progress.Progress(iterations, "iterations") as bar:
            for iteration, _ in enumerate(reference):
                state, _ = record(state, work, limits)
                difference = compare(
                    paged.tables(state.memory, np.array(reference.running)),
                    [reference.table[row] for row in reference.running],
                    np.asarray(state.memory.pool.refcount_N),
                )
                if difference:
                    raise ValueError(f"check: iteration {iteration}: {difference}")
                state = retire(state, work, clock)
                bar.advance()
    if np.asarray(state.memory.pool.refcount_N).any():
        raise ValueError("check: reference counts are left when all requests are done")


def compare(ours: list[np.ndarray], theirs: list[list[int]], refcount_N: np.ndarray) -> str | None:
    """What differs between two sets of tables up to renaming of blocks, or None."""
    for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(mine) != len(other):
            return f"running row {row} has {len(mine)} blocks, expected {len(other)}"
    block_Z = np.concatenate([np.zeros(0, np.int64), *ours])
    other_Z = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, theirs)])
    if (block_Z >= len(refcount_N)).any():
        return "a table names a block outside the pool"
    pairs = len(np.unique(block_Z * (other_Z.max(initial=0) + 1) + other_Z))
    if not pairs == len(np.unique(block_Z)) == len(np.unique(other_Z)):
        return "tables share blocks differently"
    if (np.bincount(block_Z, minlength=len(refcount_N)) != refcount_N).any():
        return "reference counts differ from the tables"
    return None
