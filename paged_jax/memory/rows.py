"""Rows of blocks, with a prefix cache beside the table or without: what a batch is stored in.

The verbs are ``block_table``'s and ``prefix_cache``'s; without a cache nothing is ever found, and
what nobody holds is free. With several cache groups the table has B rows for each, group by group,
over the one pool; a verb takes B rows, and does to those of every group the same.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import MOST
from paged_jax.memory import block_table, cache_groups, prefix_cache
from paged_jax.memory.block_table import BlockTable, Copies
from paged_jax.memory.cache_groups import Windows
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.ledger import Ledger
from paged_jax.memory.loops import when
from paged_jax.memory.prefix_cache import PrefixCache


class Rows(flax.struct.PyTreeNode):
    """A block table and what its blocks are known to hold."""

    table: BlockTable  # row g * B + b is row b of group g
    prefix: PrefixCache | None = None
    windows: Windows = flax.struct.field(pytree_node=False, default=(None,))  # of each group

    @property
    def length_B(self) -> jax.Array:
        """Tokens stored in each row, i32; 0 for an empty one."""
        return self.table.length_B if self._alone else self.table.length_B[: self.rows]

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.table.block_size

    @property
    def rows(self) -> int:
        """Rows of each group."""
        return self.table.length_B.shape[0] // len(self.windows)

    @property
    def tables(self) -> tuple[jax.Array, ...]:
        """The block table [B, M] of each group."""
        table_BM = self.table.table_BM
        return (table_BM,) if self._alone else tuple(jnp.split(table_BM, len(self.windows)))

    @property
    def passed(self) -> jax.Array | None:
        """Cells whose blocks a window has left behind, i32; None where there is no window."""
        first_B = self.table.first_B
        return None if first_B is None else first_B.sum(dtype=jnp.int32)

    @property
    def room(self) -> jax.Array:
        """Blocks that no row holds."""
        free = self.table.pool.free
        return free if self.prefix is None else prefix_cache.room(self.table, self.prefix)

    @property
    def idle(self) -> jax.Array:
        """Blocks among them that are kept for hits."""
        return jnp.int32(0) if self.prefix is None else self.prefix.idle

    def ledger(
        self, final_B: jax.Array, *, pool_slots: jax.Array | int, short: jax.Array | bool = False
    ) -> Ledger:
        """The ledger of this moment; arguments as ``block_table.ledger``'s."""
        if self.prefix is None:
            return block_table.ledger(
                self.table, self._in_groups(final_B), pool_slots=pool_slots, short=short
            )
        return prefix_cache.ledger(
            self.table, self.prefix, final_B, pool_slots=pool_slots, short=short
        )

    def demand(self, tokens_B: jax.Array) -> jax.Array:
        """Blocks of ``room`` that ``reserve`` of so many tokens would take, copies included."""
        return block_table.demand(self.table, self._in_groups(tokens_B))

    def reserve(
        self, tokens_B: jax.Array, *, most_tokens: int | None = None
    ) -> tuple[Rows, Copies, jax.Array]:
        """Room for more tokens in each row, or for none at all: ``(rows', copies, fits)``."""
        if self.prefix is None:
            table, copies, fits = block_table.reserve(
                self.table, self._in_groups(tokens_B), most_tokens=most_tokens
            )
            return self.replace(table=table), copies, fits
        table, prefix, copies, fits = prefix_cache.reserve(
            self.table, self.prefix, tokens_B, most_tokens=most_tokens
        )
        return self.replace(table=table, prefix=prefix), copies, fits

    def release(self, rows_B: jax.Array) -> Rows:
        """Empties the marked rows that hold anything."""
        rows_B &= self.length_B > 0
        if self.prefix is None:
            return self.replace(table=block_table.release(self.table, self._in_groups(rows_B))[0])
        table, prefix, _ = prefix_cache.release(self.table, self.prefix, rows_B)
        return self.replace(table=table, prefix=prefix)

    def slide(self) -> Rows:
        """Releases blocks that lie wholly behind the window of their group.

        Between two steps: nobody sees further back than the next token.
        """
        if self.table.first_B is None:
            return self
        visible = [MOST if window is None else window for window in self.windows]
        window_B = jnp.asarray(np.repeat(visible, self.rows), jnp.int32)
        first_B = cache_groups.cells_behind(self.table.length_B, window_B, self.block_size)
        return self.replace(table=block_table.release_heads(self.table, first_B))

    def fork(self, parent_B: jax.Array) -> Rows:
        """Empty rows share all blocks of their parents; B: stays as it is."""
        return self.replace(table=block_table.fork(self.table, self._rows_in_groups(parent_B))[0])

    def reorder(self, parent_B: jax.Array) -> Rows:
        """Every row becomes a copy of its parent, at once."""
        if self.prefix is None:
            parent_B = self._rows_in_groups(parent_B)
            return self.replace(table=block_table.reorder(self.table, parent_B))
        table, prefix = prefix_cache.reorder(self.table, self.prefix, parent_B)
        return self.replace(table=table, prefix=prefix)

    def need(self, blocks: jax.Array, rows: jax.Array, step_tokens: jax.Array) -> jax.Array:
        """Blocks that ``rows`` rows take at most, ``blocks`` where every token is kept.

        ``step_tokens``: tokens of one step, at most.
        """
        return cache_groups.most_blocks(self.windows, blocks, rows, step_tokens, self.block_size)

    def outstanding(
        self, gap_B: jax.Array, stored_B: jax.Array, step_tokens: jax.Array
    ) -> jax.Array:
        """Blocks that rows have yet to take at most, ``gap_B`` each where every token is kept.

        ``stored_B``: tokens that rows have room for; with a window they hold as much as a step of
        ``step_tokens`` tokens sees, and no more.
        """
        if self.table.first_B is None:
            return gap_B.sum(dtype=jnp.int32)
        taken = jnp.int32(0)
        for window, first_B in zip(
            self.windows, jnp.split(self.table.first_B, len(self.windows)), strict=True
        ):
            more_B = gap_B
            if window is not None:
                most = cache_groups.most_held(window, step_tokens, self.block_size)
                more_B = jnp.clip(most - (blocks_of(stored_B, self.block_size) - first_B), 0, gap_B)
            taken += more_B.sum(dtype=jnp.int32)
        return taken

    def match(
        self, token_T: jax.Array, count: jax.Array, salt: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The cached blocks that a sequence begins with, and how many: ``(block_M, hits)``."""
        if self.prefix is None:
            return jnp.full(1, self.table.pool.none, jnp.int32), jnp.int32(0)
        return prefix_cache.match(self.prefix, token_T, count, salt)

    def extra_need(self, block_M: jax.Array, hits: jax.Array) -> jax.Array:
        """What ``hits`` change about the blocks of ``room`` that a sequence takes; not above 0."""
        if self.prefix is None:
            return jnp.int32(0)
        return prefix_cache.need(self.table, block_M, hits, jnp.int32(0))

    def adopt(self, row: jax.Array, block_M: jax.Array, hits: jax.Array) -> Rows:
        """An empty row holds what ``match`` found."""
        if self.prefix is None:
            return self
        table, prefix, _ = prefix_cache.adopt(self.table, self.prefix, row, block_M, hits)
        return self.replace(table=table, prefix=prefix)

    def register(
        self,
        token_RT: jax.Array,
        salt_B: jax.Array,
        source_B: jax.Array,
        tokens_B: jax.Array,
        most_B: jax.Array,
    ) -> Rows:
        """Blocks that rows have filled with their last ``tokens_B`` tokens are found from now on.

        Row b's tokens are ``token_RT[source_B[b]]``, of which ``most_B`` count.
        """
        if self.prefix is None:
            return self
        size, length_B = self.table.block_size, self.table.length_B
        first_B = jnp.minimum(length_B - tokens_B, most_B) // size
        end_B = jnp.minimum(length_B, most_B) // size

        def key(row: jax.Array, prefix: PrefixCache) -> PrefixCache:
            def insert(prefix: PrefixCache) -> PrefixCache:
                token_T, span = token_RT[source_B[row]], (first_B[row], end_B[row])
                return prefix_cache.register(self.table, prefix, row, token_T, *span, salt_B[row])[
                    0
                ]

            return when(end_B[row] > first_B[row], insert, prefix)

        count = jnp.where((end_B > first_B).any(), len(length_B), 0)
        return self.replace(prefix=jax.lax.fori_loop(0, count, key, self.prefix))

    @property
    def _alone(self) -> bool:
        return len(self.windows) == 1

    def _in_groups(self, value_B: jax.Array) -> jax.Array:
        """What holds for each row, for its rows in all groups."""
        return value_B if self._alone else jnp.tile(value_B, len(self.windows))

    def _rows_in_groups(self, row_B: jax.Array) -> jax.Array:
        """Rows by number, in all groups; B, which is no row, is none."""
        if self._alone:
            return row_B
        rows, groups = self.rows, len(self.windows)
        before = rows * jnp.arange(groups, dtype=jnp.int32)[:, None]
        return jnp.where(row_B < rows, row_B + before, rows * groups).ravel()


def create(
    *,
    rows: int,
    blocks: int,
    block_size: int,
    blocks_per_row: int,
    caches_prefixes: bool = False,
    windows: Windows = (None,),
) -> Rows:
    """Empty rows; arguments as ``block_table.create``'s, and the window of each cache group."""
    if caches_prefixes and windows != (None,):
        raise ValueError(f"caches_prefixes: expected one group without a window, got {windows}")
    table = block_table.create(
        rows=rows * len(windows),
        blocks=blocks,
        block_size=block_size,
        blocks_per_row=blocks_per_row,
        loses_heads=any(window is not None for window in windows),
    )
    prefix = prefix_cache.create(blocks=blocks, block_size=block_size) if caches_prefixes else None
    return Rows(table, prefix, windows)
