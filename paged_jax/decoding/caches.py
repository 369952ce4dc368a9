"""A batch's cache: block tables, and the arrays that they point into.

A paged cache has blocks of ``block_size`` slots in one pool for all layers; layers of different
windows have tables of their own over it (``cache_groups``). A dense cache, the baseline, is the
same thing with one block a row, as long as a sequence can get: what is promised and never filled
then shows in the same ledger. ``grow`` makes room for a step's tokens, ``view`` is what the decoder
writes to and reads, ``keep`` takes its arrays back.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.config import ModelConfig
from paged_jax.memory import cache_groups, kv_cache, loops
from paged_jax.memory import rows as memory
from paged_jax.memory.block_table import BlockTable, Copies
from paged_jax.memory.cache_groups import CacheGroups
from paged_jax.memory.rows import Rows
from paged_jax.model.views import DenseView, PagedView
from pallas_kernels import block_io, query_tiles


class Cache(flax.struct.PyTreeNode):
    """Rows of blocks over arrays that hold all layers."""

    rows: Rows
    kv: kv_cache.KVCache | kv_cache.DenseKV
    copies: jax.Array  # i32: blocks copied on write so far
    groups: CacheGroups = flax.struct.field(pytree_node=False)
    backend: str | None = flax.struct.field(pytree_node=False, default=None)
    interpret: Any = flax.struct.field(pytree_node=False, default=False)

    @property
    def table(self) -> BlockTable:
        """The rows' block table, of all cache groups."""
        return self.rows.table

    def grow(
        self, count_B: jax.Array, *, most_tokens: int | None = None
    ) -> tuple[Cache, jax.Array]:
        """Room for ``count_B`` more tokens a row, or, where ``fits`` is False, for none."""
        rows, copies, fits = self.rows.reserve(count_B, most_tokens=most_tokens)
        return self.replace(rows=rows).copy(copies), fits

    def copy(self, copies: Copies) -> Cache:
        """The cache after the copies that a table's growth asks for."""
        made = self.count(copies)
        # A ``cond`` would copy the pool that its branches write.
        kv = loops.when(made > 0, lambda kv: kv.copy(copies), self.kv)
        return self.replace(kv=kv, copies=self.copies + made)

    def count(self, copies: Copies) -> jax.Array:
        """How many copies there are to make."""
        return (copies.target_C < self.table.pool.none).sum(dtype=jnp.int32)

    def view(
        self, live_B: jax.Array, start_P: jax.Array, queries: int
    ) -> tuple[PagedView | DenseView, jax.Array]:
        """A step's view, and the position of each of its tokens, [T].

        The last tokens of the live rows are the step's queries, cut at ``start_P``.
        """
        length_B = jnp.where(live_B, self.rows.length_B, 0)
        return self._view(length_B, self.rows.tables, start_P, queries)

    def decode_view(self, row_T: jax.Array) -> tuple[PagedView | DenseView, jax.Array]:
        """As ``view``, of the last token of each row of ``row_T``; past the last row: of none."""
        length_T = self.rows.length_B.at[row_T].get(mode="fill", fill_value=0)
        tables = tuple(table_BM.at[row_T].get(mode="clip") for table_BM in self.rows.tables)
        return self._view(length_T, tables, None, len(row_T))

    def _view(
        self,
        length_B: jax.Array,
        tables: tuple[jax.Array, ...],
        start_P: jax.Array | None,
        queries: int,
    ) -> tuple[PagedView | DenseView, jax.Array]:
        row_T, position_T = _places(length_B, start_P, queries)
        if isinstance(self.kv, kv_cache.DenseKV):
            block_T = tables[0][jnp.minimum(row_T, len(length_B) - 1), 0]
            block_T = jnp.where(position_T >= 0, block_T, self.table.pool.none)
            return DenseView(self.kv.kv_LUBKSD, block_T, position_T), position_T
        slots_of = functools.partial(
            block_io.query_slots, queries=queries, block_size=self.rows.block_size
        )
        view = PagedView(
            cache=self.kv,
            tables=tables,
            length_B=length_B,
            slots=tuple(slots_of(table_BM, length_B, start_P) for table_BM in tables),
            places=self.groups.places,
            query_start_P=start_P,
            backend=self.backend,
            interpret=self.interpret,
        )
        return view, position_T

    def keep(self, view: PagedView | DenseView) -> Cache:
        """The cache with what a step wrote."""
        if isinstance(view, PagedView):
            return self.replace(kv=view.cache)
        return self.replace(kv=self.kv.replace(kv_LUBKSD=view.kv_LUBKSD))

    def release(self, rows_B: jax.Array) -> Cache:
        """Empties the marked rows that hold anything."""
        return self.replace(rows=self.rows.release(rows_B))

    def slide(self) -> Cache:
        """Between two steps: releases blocks that windows have left behind."""
        return self.replace(rows=self.rows.slide())


def create_paged(
    config: ModelConfig,
    *,
    rows: int,
    blocks: int,
    block_size: int,
    kv_dtype: str,
    groups: CacheGroups | None = None,
    caches_prefixes: bool = False,
    backend: str | None = None,
    interpret: Any = False,
) -> Cache:
    """An empty paged cache for ``rows`` sequences of up to the model's longest context.

    ``groups``: by default those of the model's windows.
    """
    groups = groups or cache_groups.by_window(config)
    kv = kv_cache.create(
        layers=groups.layers,
        blocks=blocks,
        block_size=block_size,
        kv_heads=config.kv_heads,
        width=config.head_width,
        dtype=kv_dtype,
    )
    empty = memory.create(
        rows=rows,
        blocks=blocks,
        block_size=block_size,
        blocks_per_row=-(-config.max_length // block_size),
        caches_prefixes=caches_prefixes,
        windows=groups.windows,
    )
    return Cache(empty, kv, jnp.int32(0), groups, backend, interpret)


def create_dense(config: ModelConfig, *, rows: int, kv_dtype: str) -> Cache:
    """An empty contiguous cache for ``rows`` sequences; ``kv_dtype`` is f32 or bf16."""
    kv = kv_cache.create_dense(
        layers=config.layers,
        rows=rows,
        slots=config.max_length,
        kv_heads=config.kv_heads,
        width=config.head_width,
        dtype=kv_dtype,
    )
    empty = memory.create(rows=rows, blocks=rows, block_size=config.max_length, blocks_per_row=1)
    return Cache(empty, kv, jnp.int32(0), cache_groups.whole(config.layers))


def _places(
    length_B: jax.Array, start_P: jax.Array | None, queries: int
) -> tuple[jax.Array, jax.Array]:
    """Row and position of each query, [T]; row B where it is nobody's, position -1 if not live."""
    if start_P is None:
        return jnp.arange(queries, dtype=jnp.int32), length_B - 1
    row_T = query_tiles.row_of_tokens(start_P, queries)
    owner_T = jnp.minimum(row_T, length_B.shape[0] - 1)
    position_T = length_B[owner_T] - start_P[owner_T + 1] + jnp.arange(queries, dtype=jnp.int32)
    return row_T, jnp.where(row_T < length_B.shape[0], position_T, -1)
