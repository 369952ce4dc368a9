"""Seconds of single steps of a model: decode steps of several rows, prefill chunks of one.

They are an engine's own, ``dispatch.decode``, and ``plan`` with ``compute``, and draw the likeliest
token. Rows hold some tokens before, of zeros, which cost attention what any others do. All cells of
a batch share one pool and one compiled program. Cells are timed in turn, so that a slow minute of
the machine falls on all alike, each after its rows have been emptied and filled again.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import MOST, EngineConfig, ModelConfig
from paged_jax.decoding import sampling
from paged_jax.measure.progress import Progress
from paged_jax.model.split import Graph, split
from paged_jax.model.weights import Loaded
from paged_jax.scheduling import policy
from paged_jax.serving import cost_model, dispatch, settings
from paged_jax.serving.cost_model import StepCounts
from paged_jax.serving.dispatch import Batch


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
    graph, weights = split(model.decoder)
    batch_of = {}
    for rows in sorted({cell.rows for cell in cells}):
        pool_slots = groups * rows * blocks_a_row * config.block_size
        sized = dataclasses.replace(config, rows=rows, pool_slots=pool_slots, max_length=longest)
        batch_of[rows] = dispatch.create(
            settings.create_cache(model, sized), requests=rows, samples=1, ends=settings.ENDS
        )
    seconds: list[list[float]] = [[] for _ in cells]
    with Progress((repeats + 1) * len(cells), "runs") as bar:
        for repeat in range(repeats + 1):  # the first compiles and warms up
            for cell, times in zip(cells, seconds, strict=True):
                batch_of[cell.rows], elapsed = _time(
                    graph, weights, batch_of[cell.rows], cell, decode_steps
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
    graph: Graph, weights: list[jax.Array], batch: Batch, cell: Cell, decode_steps: int
) -> tuple[Batch, float]:
    """Seconds of one step of a cell, and the batch after it."""
    steps = 1 if cell.chunk else decode_steps
    limits = policy.limits(rows=cell.rows, tokens=max(cell.rows, cell.chunk))
    batch = _fill(batch, np.int32(cell.stored), np.int32(cell.chunk or 1))
    packed = np.zeros(cell.chunk, np.int32), np.array([0, cell.chunk], np.int32)
    jax.block_until_ready(batch)
    start = time.perf_counter()
    if cell.chunk:
        batch, planned = dispatch.plan(batch, limits)
        batch, _ = dispatch.compute(
            graph,
            weights,
            batch,
            planned.step,
            planned.copies,
            *packed,
            uses=sampling.Uses(),
        )
    else:
        batch, _ = dispatch.decode(
            graph,
            weights,
            batch,
            limits,
            np.int32(steps),
            np.bool_(False),
            most_steps=steps,
            most_rows=cell.rows,
            uses=sampling.Uses(),
        )
    jax.block_until_ready(batch)
    elapsed = time.perf_counter() - start
    grown = cell.stored + (cell.chunk or decode_steps)
    assert (batch.cache.rows.length_B == grown).all(), "the pool has room for the longest rows"
    return batch, elapsed / steps


@functools.partial(jax.jit, donate_argnames="batch")
def _fill(batch: Batch, stored: jax.Array, wanted: jax.Array) -> Batch:
    """A request in every row, which has stored so many tokens and has some more to store."""
    rows = batch.token_B.shape[0]
    row_B, every_B = jnp.arange(rows, dtype=jnp.int32), jnp.ones(rows, bool)
    cache, _ = batch.cache.release(every_B).grow(jnp.full(rows, stored))
    book = batch.book.replace(
        rank_R=row_B,
        running_R=every_B,
        prompt_R=jnp.full(rows, stored + wanted),
        output_RF=jnp.full((rows, 1), MOST),
        drawn_RF=jnp.zeros((rows, 1), jnp.int32),
        live_RF=every_B[:, None],
        owner_B=row_B,
    )
    return batch.replace(book=book, cache=cache)
