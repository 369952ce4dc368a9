"""Seconds of single steps of a model: decode steps of several rows, prefill chunks of one.

A step makes room, runs the decoder and takes the likeliest token of each row; what an engine adds
to that (planning, sampling) is not in it. Rows hold some tokens before, of zeros, which cost
attention what any others do. All cells of a batch share one pool and one compiled program. Cells
are timed in turn, so that a slow minute of the machine falls on all alike, each after its rows have
been emptied and filled again.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.config import EngineConfig, ModelConfig
from paged_jax.decoding.caches import Cache
from paged_jax.measure.progress import Progress
from paged_jax.model.weights import Loaded
from paged_jax.serving import cost_model, settings
from paged_jax.serving.cost_model import StepCounts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kind of step: ``rows`` decode a token each, or one row stores ``chunk`` at once."""

    rows: int = 1
    chunk: int = 0  # 0: a decode step
    stored: int  # tokens of each row before


def measure(
    model: Loaded, config: EngineConfig, cells: Sequence[Cell], *, decode_steps: int, repeats: int
) -> list[tuple[StepCounts, float]]:
    """Counts of a step of each cell, in host numbers, and the median of its seconds.

    A decode step's are means over ``decode_steps`` in one dispatch. Raises ``ValueError`` where a
    cell passes the model's context.
    """
    longest = max(cell.stored + (cell.chunk or decode_steps) for cell in cells)
    if longest > model.config.max_length:
        raise ValueError(
            f"--contexts: a row comes to {longest} tokens, the model's context is"
            f" {model.config.max_length}"
        )
    blocks_a_row = -(-longest // config.block_size)
    shape = dataclasses.replace(config, max_length=longest)
    groups = settings.groups_of(model.config, shape).count
    graphdef, weights = nnx.split(model.decoder)
    cache_of = {
        rows: settings.create_cache(
            model,
            dataclasses.replace(
                config,
                rows=rows,
                pool_slots=groups * rows * blocks_a_row * config.block_size,
                max_length=longest,
            ),
        )
        for rows in sorted({cell.rows for cell in cells})
    }
    seconds: list[list[float]] = [[] for _ in cells]
    with Progress((repeats + 1) * len(cells), "runs") as bar:
        for repeat in range(repeats + 1):  # the first compiles and warms up
            for cell, times in zip(cells, seconds, strict=True):
                cache_of[cell.rows], elapsed = _time(
                    graphdef, weights, cache_of[cell.rows], cell, decode_steps
                )
                if repeat:
                    times.append(elapsed)
                bar.advance()
    counts = [count_cell(model.config, cell, decode_steps) for cell in cells]
    return list(zip(counts, map(statistics.median, seconds), strict=True))


def count_cell(model: ModelConfig, cell: Cell, decode_steps: int) -> StepCounts:
    """Counts of a cell's step in host numbers: the mean of its decode steps."""
    lengths = [cell.stored + cell.chunk]
    if not cell.chunk:
        lengths = [cell.stored + step for step in range(1, decode_steps + 1)]
    queries_B, every_B = jnp.full(cell.rows, cell.chunk or 1), jnp.ones(cell.rows, bool)
    found = [
        cost_model.count_step(model, jnp.full(cell.rows, length), queries_B, every_B)
        for length in lengths
    ]
    return jax.tree.map(lambda *each: float(sum(each)) / len(each), *found)


def _time(
    graphdef: Any, weights: Any, cache: Cache, cell: Cell, decode_steps: int
) -> tuple[Cache, float]:
    """Seconds of one step of a cell, and the cache after it."""
    steps = 1 if cell.chunk else decode_steps
    cache = jax.block_until_ready(_refill(cache, jnp.int32(cell.stored)))
    start = time.perf_counter()
    cache, _ = jax.block_until_ready(
        _run(graphdef, weights, cache, steps=steps, chunk=cell.chunk or None)
    )
    elapsed = time.perf_counter() - start
    grown = cell.stored + (cell.chunk or decode_steps)
    assert (cache.rows.length_B == grown).all(), "the pool has room for the longest rows"
    return cache, elapsed / steps


@functools.partial(jax.jit, donate_argnames="cache")
def _refill(cache: Cache, stored: jax.Array) -> Cache:
    """All rows emptied, then holding so many tokens each."""
    rows = cache.rows.rows
    return cache.release(jnp.ones(rows, bool)).grow(jnp.full(rows, stored))[0]


@functools.partial(jax.jit, static_argnames=("graphdef", "steps", "chunk"), donate_argnames="cache")
def _run(
    graphdef: Any, weights: Any, cache: Cache, *, steps: int, chunk: int | None
) -> tuple[Cache, jax.Array]:
    """The cache after steps of a token for each row, or of a chunk for the only row.

    Tokens come back, too: logits that nobody took would not be computed.
    """
    rows = cache.rows.rows
    start_P = None if chunk is None else jnp.array([0, chunk])

    def step(_: jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, token_B = carry
        cache, _fits = cache.grow(jnp.full(rows, chunk or 1), most_tokens=chunk or 1)
        view, position_T = cache.view(jnp.ones(rows, bool), start_P, chunk or rows)
        decoder = nnx.merge(graphdef, weights)
        hidden_TE, view = decoder(jnp.resize(token_B, (chunk or rows,)), position_T, view)
        logits_BV = decoder.logits(hidden_TE[-rows:])
        return cache.keep(view), logits_BV.argmax(axis=1).astype(jnp.int32)

    return lax.fori_loop(0, steps, step, (cache, jnp.zeros(rows, jnp.int32)))
