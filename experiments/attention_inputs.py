"""Shapes of attention to time, and inputs that no cache holds when they are read.

A *shape* is one call. Its inputs come in several sets over one pool, each with blocks, queries and
a table of its own, so that the calls of one timed dispatch read memory nobody read before; between
dispatches ``evictor`` writes more than the last-level cache holds. Ragged lengths are
``context * (b / (B - 1)) ** 3`` for row b: their mean is a quarter of the longest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.problem import QUANTISED, Problem

SEED = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One call of attention: decode where ``chunk`` is 1, else prefill of a chunk of every row."""

    batch: int  # rows
    context: int  # tokens of the longest row, its queries included
    chunk: int  # query tokens of a row
    ragged: bool
    block_size: int
    query_heads: int
    kv_heads: int
    width: int
    dtype: str  # of the cache; queries are bfloat16 where it is a quantised one

    @property
    def row_blocks(self) -> int:
        """Blocks of the longest row."""
        return -(-self.context // self.block_size)

    @property
    def query_dtype(self) -> str:
        """Of queries and outputs."""
        return "bfloat16" if self.dtype in QUANTISED else self.dtype

    def lengths(self) -> np.ndarray:
        """Stored tokens of every row, i32 [B]; each row holds its queries."""
        if not self.ragged or self.batch == 1:
            return np.full(self.batch, self.context, np.int32)
        share_B = (np.arange(self.batch) / (self.batch - 1)) ** 3
        return np.maximum(np.ceil(self.context * share_B), self.chunk).astype(np.int32)

    def moved_bytes(self) -> int:
        """Fewest bytes that a call moves: stored tokens, queries and outputs, each once."""
        cache = 2 * self.kv_heads * self.width * jnp.dtype(self.dtype).itemsize
        ends = 2 * self.query_heads * self.width * jnp.dtype(self.query_dtype).itemsize
        return int(self.lengths().sum()) * cache + self.batch * self.chunk * ends

    def operations(self) -> int:
        """Multiplications and additions of the two products, causal mask applied."""
        seen = self.chunk * self.lengths().astype(np.int64) - self.chunk * (self.chunk - 1) // 2
        return 4 * self.query_heads * self.width * int(seen.sum())


class Inputs(NamedTuple):
    """Arguments of ``paged_attention`` for one set, but the pool."""

    q_THD: jax.Array
    table_BM: jax.Array
    length_B: jax.Array
    query_start_P: jax.Array | None


class Batch(NamedTuple):
    """A pool, and sets of inputs that share no block of it."""

    kv_NUKSD: jax.Array
    paged: list[Inputs]  # blocks in random order
    contiguous: list[Inputs]  # the same calls, row b of set i in one piece


def draw(shape: Shape, sets: int) -> Batch:
    """Random inputs of a shape; the values are N(0, 1), cut to whole numbers in int8."""
    rng = np.random.default_rng(SEED)
    kv_NUKSD, queries = _values(shape, sets)
    # Lengths in random order: neighbours on a processor do not get like rows.
    length_B = jnp.asarray(rng.permutation(shape.lengths()))
    start_P = None
    if shape.chunk > 1:
        start_P = jnp.arange(shape.batch + 1, dtype=jnp.int32) * shape.chunk
    places = np.arange(len(kv_NUKSD), dtype=np.int32)

    def inputs(block_N: np.ndarray) -> list[Inputs]:
        tables = block_N.reshape(sets, shape.batch, shape.row_blocks)
        return [
            Inputs(q_THD, jnp.asarray(table_BM), length_B, start_P)
            for q_THD, table_BM in zip(queries, tables, strict=True)
        ]

    return Batch(kv_NUKSD, paged=inputs(rng.permutation(places)), contiguous=inputs(places))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _values(shape: Shape, sets: int) -> tuple[jax.Array, list[jax.Array]]:
    """A pool and the queries of every set, in one program: a large pool is never there twice."""
    keys = jax.random.split(jax.random.key(SEED, impl="rbg"), sets + 1)  # the quickest to compile
    pool = (sets * shape.batch * shape.row_blocks, 2, shape.kv_heads, shape.block_size, shape.width)
    queries = (shape.batch * shape.chunk, shape.query_heads, shape.width)
    kv_NUKSD = jax.random.normal(keys[0], pool, shape.query_dtype).astype(shape.dtype)
    return kv_NUKSD, [jax.random.normal(key, queries, shape.query_dtype) for key in keys[1:]]


def set_count(shape: Shape, rotate_bytes: int, most: int) -> int:
    """Sets that hold ``rotate_bytes`` together, but at most ``most``, and if it allows them 3."""
    return min(most, max(3, -(-rotate_bytes // shape.moved_bytes())))


def evictor(size_bytes: int) -> Callable[[], jax.Array]:
    """A function that rewrites so many bytes of memory, and thereby what caches hold."""
    buffer_N = jnp.zeros(size_bytes // 4, jnp.uint32)
    increment = jax.jit(lambda array_N: array_N + 1, donate_argnums=0)

    def evict() -> jax.Array:
        nonlocal buffer_N
        buffer_N = increment(buffer_N)
        return buffer_N

    return evict


def cache_scale(shape: Shape) -> float | None:
    """The scale of keys and of values, which a quantised cache needs."""
    return 1.0 if shape.dtype in QUANTISED else None


def problem_of(shape: Shape) -> Problem:
    """What ``paged_attention`` makes of a call whose pool has one set of blocks."""
    scale = "head" if shape.dtype in QUANTISED else None
    return Problem(
        rows=shape.batch,
        queries=shape.batch * shape.chunk,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        width=shape.width,
        block_size=shape.block_size,
        blocks=shape.batch * shape.row_blocks,
        row_blocks=shape.row_blocks,
        dtype=shape.query_dtype,
        cache_dtype=shape.dtype,
        decode=shape.chunk == 1,
        scale=shape.width**-0.5,
        k_scale=scale,
        v_scale=scale,
    )
