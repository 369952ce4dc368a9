"""The two memories that a batch of rows can generate in, with the same verbs.

``grow`` makes room for a step's tokens, ``view`` is what the decoder writes to and reads, ``keep``
takes its arrays back, ``fork``, ``reorder`` and ``release`` move whole rows. ``PagedCache`` moves
table entries and copies at most a block a row; ``DenseCache``, the baseline, copies rows whole.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.config import ModelConfig
from paged_jax.memory import block_table, kv_cache, loops
from paged_jax.model.views import DenseView, PagedView
from pallas_kernels import block_io, query_tiles


class PagedCache(flax.struct.PyTreeNode):
    """Rows of a block table over a pool that holds all layers."""

    table: block_table.BlockTable
    kv: kv_cache.KVCache
    copies: jax.Array  # i32: blocks copied on write so far
    backend: str | None = flax.struct.field(pytree_node=False, default=None)
    interpret: Any = flax.struct.field(pytree_node=False, default=False)

    @property
    def length_B(self) -> jax.Array:
        """Stored tokens of each row."""
        return self.table.length_B

    def grow(
        self, count_B: jax.Array, *, most_tokens: int | None = None
    ) -> tuple[PagedCache, jax.Array]:
        """Room for ``count_B`` more tokens a row, or, where ``fits`` is False, for none."""
        table, copies, fits = block_table.reserve(self.table, count_B, most_tokens=most_tokens)
        made = (copies.target_C < table.pool.none).sum(dtype=jnp.int32)
        # A ``cond`` would copy the pool that its branches write.
        kv = loops.when(made > 0, lambda kv: kv.copy(copies), self.kv)
        return self.replace(table=table, kv=kv, copies=self.copies + made), fits

    def view(
        self, live_B: jax.Array, start_P: jax.Array | None, queries: int
    ) -> tuple[PagedView, jax.Array]:
        """A step's view, and the position of each of its tokens, [T].

        The last tokens of the rows are the step's queries, cut at ``start_P``; without it every
        row has one, which counts where ``live_B`` holds.
        """
        length_B = jnp.where(live_B, self.length_B, 0)
        slot_T = block_io.query_slots(
            self.table.table_BM,
            length_B,
            start_P,
            queries=queries,
            block_size=self.table.block_size,
        )
        view = PagedView(
            cache=self.kv,
            table_BM=self.table.table_BM,
            length_B=length_B,
            slot_T=slot_T,
            query_start_P=start_P,
            backend=self.backend,
            interpret=self.interpret,
        )
        return view, _places(length_B, start_P, queries)[1]

    def keep(self, view: PagedView) -> PagedCache:
        """The cache with what a step wrote."""
        return self.replace(kv=view.cache)

    def fork(self, parent_B: jax.Array) -> PagedCache:
        """Empty rows become copies of their parents; B: stays as it is."""
        table, _fits = block_table.fork(self.table, parent_B)
        return self.replace(table=table)

    def reorder(self, parent_B: jax.Array) -> PagedCache:
        """Every row becomes a copy of its parent, at once."""
        return self.replace(table=block_table.reorder(self.table, parent_B))

    def release(self, rows_B: jax.Array) -> PagedCache:
        """Empties the marked rows that hold anything."""
        table, _valid = block_table.release(self.table, rows_B & (self.length_B > 0))
        return self.replace(table=table)


class DenseCache(flax.struct.PyTreeNode):
    """A contiguous row of ``max_length`` slots for each sequence."""

    kv_LUBKSD: jax.Array
    length_B: jax.Array

    def grow(
        self, count_B: jax.Array, *, most_tokens: int | None = None
    ) -> tuple[DenseCache, jax.Array]:
        """As ``PagedCache.grow``; the room is there from the start."""
        length_B = self.length_B + count_B
        fits = (length_B <= self.kv_LUBKSD.shape[4]).all()
        return self.replace(length_B=jnp.where(fits, length_B, self.length_B)), fits

    def view(
        self, live_B: jax.Array, start_P: jax.Array | None, queries: int
    ) -> tuple[DenseView, jax.Array]:
        """As ``PagedCache.view``."""
        row_T, position_T = _places(jnp.where(live_B, self.length_B, 0), start_P, queries)
        row_T = jnp.where(position_T >= 0, row_T, live_B.shape[0])
        return DenseView(self.kv_LUBKSD, row_T, position_T), position_T

    def keep(self, view: DenseView) -> DenseCache:
        """The cache with what a step wrote."""
        return self.replace(kv_LUBKSD=view.kv_LUBKSD)

    def fork(self, parent_B: jax.Array) -> DenseCache:
        """As ``PagedCache.fork``, by copying rows."""
        rows = jnp.arange(parent_B.shape[0])
        return self.reorder(jnp.where(parent_B < parent_B.shape[0], parent_B, rows))

    def reorder(self, parent_B: jax.Array) -> DenseCache:
        """As ``PagedCache.reorder``, by copying rows."""
        return self.replace(
            kv_LUBKSD=self.kv_LUBKSD[:, :, parent_B], length_B=self.length_B[parent_B]
        )

    def release(self, rows_B: jax.Array) -> DenseCache:
        """As ``PagedCache.release``."""
        return self.replace(length_B=jnp.where(rows_B, 0, self.length_B))


Cache = PagedCache | DenseCache


def create_paged(
    config: ModelConfig,
    *,
    rows: int,
    blocks: int,
    block_size: int,
    kv_dtype: str,
    backend: str | None = None,
    interpret: Any = False,
) -> PagedCache:
    """An empty paged cache for ``rows`` sequences of up to the model's longest context."""
    return PagedCache(
        table=block_table.create(
            rows=rows,
            blocks=blocks,
            block_size=block_size,
            blocks_per_row=-(-config.max_length // block_size),
        ),
        kv=kv_cache.create(
            layers=config.layers,
            blocks=blocks,
            block_size=block_size,
            kv_heads=config.kv_heads,
            width=config.head_width,
            dtype=kv_dtype,
        ),
        copies=jnp.int32(0),
        backend=backend,
        interpret=interpret,
    )


def create_dense(config: ModelConfig, *, rows: int, kv_dtype: str) -> DenseCache:
    """An empty contiguous cache for ``rows`` sequences; ``kv_dtype`` is f32 or bf16."""
    shape = (config.layers, 2, rows, config.kv_heads, config.max_length, config.head_width)
    return DenseCache(
        kv_LUBKSD=jnp.zeros(shape, kv_cache.DTYPES[kv_dtype]), length_B=jnp.zeros(rows, jnp.int32)
    )


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
