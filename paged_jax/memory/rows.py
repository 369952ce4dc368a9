"""Rows of blocks, with a prefix cache and host memory beside the table or without: what a batch is
stored in.

The verbs are ``block_table``'s, ``prefix_cache``'s and ``swap``'s; without a cache nothing is ever
found, and what nobody holds is free; without host memory nothing is ever swapped. With several
cache groups a table has B rows for each, group by group, over the one pool; a verb takes B rows,
and does to those of every group the same.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import MOST
from paged_jax.memory import block_table, cache_groups, prefix_cache, swap
from paged_jax.memory.block_table import BlockTable, Copies
from paged_jax.memory.cache_groups import Windows
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.ledger import Ledger
from paged_jax.memory.loops import when
from paged_jax.memory.prefix_cache import PrefixCache
from paged_jax.memory.swap import Host


class Rows(flax.struct.PyTreeNode):
    """A block table, what its blocks are known to hold, and rows that wait in host memory."""

    table: BlockTable  # row g * B + b is row b of group g
    prefix: PrefixCache | None = None
    host: Host | None = None
    windows: Windows = flax.struct.field(pytree_node=False, default=(None,))  # of each group

    def with_host(self, *, rows: int, blocks: int) -> Rows:
        """The same with empty host memory of ``blocks`` blocks for so many rows that wait."""
        rows *= len(self.windows)
        return self.replace(host=swap.create(self.table, rows=rows, blocks=blocks))

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

    @property
    def host_room(self) -> jax.Array:
        """Free blocks of host memory."""
        return jnp.int32(0) if self.host is None else self.host.table.pool.free

    def host_ledger(self, final_Z: jax.Array) -> Ledger:
        """The ledger of host memory, whose rows will store ``final_Z`` tokens in the end."""
        assert self.host is not None, "there is no host memory"
        table = self.host.table
        pool_slots = table.pool.blocks * table.block_size
        return block_table.ledger(table, self._in_groups(final_Z), pool_slots=pool_slots)

    def swapped_lengths(self, row_F: jax.Array) -> jax.Array:
        """Tokens of rows in host memory, [F]; 0 for one that is not there."""
        if self.host is None:
            return jnp.zeros(row_F.shape, jnp.int32)
        return self.host.table.length_B[row_F]

    def swapped_need(self, row_F: jax.Array, tokens_F: jax.Array) -> jax.Array:
        """Blocks that a request's rows in host memory take, back and with so many more tokens."""
        if self.host is None:
            return jnp.int32(0)
        table, row_F = self.host.table, self._rows_in_groups(row_F, self._host_rows)
        rows = table.replace(
            table_BM=table.table_BM[row_F], length_B=table.length_B[row_F], first_B=None
        )
        return swap.blocks(table, row_F) + block_table.demand(rows, self._in_groups(tokens_F))

    def blocks(self, row_F: jax.Array) -> jax.Array:
        """Blocks that a request's rows hold together, each once; rows past the end hold none."""
        return swap.blocks(self.table, self._rows_in_groups(row_F))

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

    def swap_out(self, row_F: jax.Array, to_F: jax.Array) -> Rows:
        """Rows of a request get blocks in host memory, which has room; they are not emptied yet."""
        assert self.host is not None, "there is no host memory"
        row_F, to_F = self._rows_in_groups(row_F), self._rows_in_groups(to_F, self._host_rows)
        table, device_FM, host_FM = swap.copy_rows(self.table, row_F, self.host.table, to_F)
        return self.replace(host=self._moved(to_F, table, device_FM, host_FM))

    def swap_in(self, from_F: jax.Array, row_F: jax.Array) -> Rows:
        """Empty rows get what a request's rows in host memory hold, and those are emptied.

        ``room`` has as many blocks. Rows past the end are nobody's.
        """
        assert self.host is not None, "there is no host memory"
        held, device, prefix = self.host.table, self.table, self.prefix
        row_F, from_F = self._rows_in_groups(row_F), self._rows_in_groups(from_F, self._host_rows)
        if prefix is not None:
            need = swap.blocks(held, from_F)
            device, prefix, _ = prefix_cache.make_room(device, prefix, need)
        device, host_FM, device_FM = swap.copy_rows(held, from_F, device, row_F)
        marked_Z = jnp.zeros(held.length_B.shape, bool).at[from_F].set(True, mode="drop")
        held, _ = block_table.release(held, marked_Z & (held.length_B > 0))
        host = self._moved(from_F, held, device_FM, host_FM)
        return self.replace(table=device, prefix=prefix, host=host)

    def forget(self, rows_Z: jax.Array) -> Rows:
        """The marked rows in host memory are emptied, if there are any."""
        if self.host is None:
            return self
        held = self.host.table
        held, _ = block_table.release(held, self._in_groups(rows_Z) & (held.length_B > 0))
        return self.replace(host=self.host.replace(table=held))

    def _moved(
        self, row_F: jax.Array, table: BlockTable, device_FM: jax.Array, host_FM: jax.Array
    ) -> Host:
        """The host side after a move of its rows ``row_F``."""
        assert self.host is not None, "there is no host memory"
        return Host(
            table=table,
            device_ZM=self.host.device_ZM.at[row_F].set(device_FM, mode="drop"),
            host_ZM=self.host.host_ZM.at[row_F].set(host_FM, mode="drop"),
        )

    @property
    def _alone(self) -> bool:
        return len(self.windows) == 1

    def _in_groups(self, value_B: jax.Array) -> jax.Array:
        """What holds for each row, for its rows in all groups."""
        return value_B if self._alone else jnp.tile(value_B, len(self.windows))

    @property
    def _host_rows(self) -> int:
        """Rows of each group in host memory."""
        assert self.host is not None, "there is no host memory"
        return self.host.table.length_B.shape[0] // len(self.windows)

    def _rows_in_groups(self, row_B: jax.Array, rows: int | None = None) -> jax.Array:
        """Rows by number, of ``rows`` in each group, in all groups; one past the end is none."""
        if self._alone:
            return row_B
        groups, rows = len(self.windows), self.rows if rows is None else rows
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
    return Rows(table, prefix, windows=windows)
