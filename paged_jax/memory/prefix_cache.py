"""A prefix cache beside a block table: full blocks by content, kept when nobody holds them.

A *keyed* block is full and found by its tokens and all before them (``prefix_index``). Blocks that
no row holds are now of two kinds: *free* ones are not keyed and stand in the pool's queue, *idle*
ones are keyed and stand in a list of their own, the longest idle first. Requests can have both:
``room``. ``pool.used`` counts idle blocks.

A hit runs from the first block on, every block verified, up to the first that is missing, and
never covers a sequence's last token. Idle blocks are evicted where the pool's queue is too short:
the least recently released first, a sequence's tail before its head, so that no block is kept
that could not be reached. Rules as in vLLM's v1 block manager.

Cost: O(1) expected for each block found, adopted, keyed or evicted, besides its tokens; O(B * M) a
release. Loops run over the blocks touched; nothing scans or copies the pool.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory import block_table, idle_list, prefix_index
from paged_jax.memory import ledger as ledgers
from paged_jax.memory import linked_list as lists
from paged_jax.memory import pool as pools
from paged_jax.memory import prefix_keys as keys
from paged_jax.memory.block_table import BlockTable
from paged_jax.memory.layout import blocks_of
from paged_jax.memory.loops import at, fetch, when
from pallas_kernels import dims


class PrefixCache(flax.struct.PyTreeNode):
    """What the blocks of a table's pool hold, and in which order idle ones are evicted."""

    index: prefix_index.Index
    order: idle_list.IdleList

    @property
    def idle(self) -> jax.Array:
        """Blocks that no row holds and that are kept for hits."""
        return self.order.count


def create(*, blocks: int, block_size: int) -> PrefixCache:
    """An empty cache beside a table of so many blocks. ``ValueError`` for sizes below 1."""
    return PrefixCache(prefix_index.create(blocks, block_size), idle_list.create(blocks))


def match(
    cache: PrefixCache, token_T: jax.Array, count: jax.Array | int, salt: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The longest chain of cached blocks that a sequence begins with; nothing changes.

    Args:
      cache: the cache.
      token_T: i32, tokens of the sequence, anything from ``count`` on.
      count: i32, how many tokens the sequence has.
      salt: u32, of its tenant.

    Returns:
      ``(block_M, hits)``: the blocks, N from ``hits`` on; M = T // block size, at least 1.
    """
    most = _most_hits(count, cache.index.token_NS.shape[1])
    return prefix_index.find_chain(cache.index, token_T, most, salt)


def need(
    table: BlockTable, block_M: jax.Array, hits: jax.Array | int, tokens: jax.Array | int
) -> jax.Array:
    """Blocks of ``room`` that storing ``tokens`` tokens takes after a ``match``.

    New blocks, and the hits that are idle: those leave ``room``, but no new block is taken for
    them.
    """
    held_M = table.pool.refcount_N.at[block_M].get(mode="fill", fill_value=1)
    woken_M = (jnp.arange(block_M.shape[0]) < hits) & (held_M == 0)
    return blocks_of(tokens, table.block_size) - hits + woken_M.sum(dtype=jnp.int32)


def room(table: BlockTable, cache: PrefixCache) -> jax.Array:
    """Blocks that no row holds: free ones, and idle ones that ``make_room`` would evict."""
    return table.pool.free + cache.idle


def adopt(
    table: BlockTable,
    cache: PrefixCache,
    row: jax.Array | int,
    block_M: jax.Array,
    hits: jax.Array | int,
) -> tuple[BlockTable, PrefixCache, jax.Array]:
    """An empty row holds the first ``hits`` blocks of a ``match`` now; nothing evicts them.

    Returns ``(table', cache', fits)``. ``fits`` is False, and nothing changed, where there is no
    such row, it is not empty or has fewer cells, or where a block is not keyed any more.
    """
    _demand_fit(table, cache)
    rows, cells = table.table_BM.shape
    fits = (row >= 0) & (row < rows) & (hits >= 0) & (hits <= min(cells, block_M.shape[0]))
    row = jnp.where(fits, row, 0)
    keyed_M = cache.index.keyed_N.at[block_M].get(mode="fill", fill_value=False)
    fits &= (keyed_M | (jnp.arange(block_M.shape[0]) >= hits)).all()
    fits &= table.length_B[row] == 0
    hits = jnp.where(fits, hits, 0)

    def hold(cell: jax.Array, carry: tuple) -> tuple:
        refcount_N, table_BM, order = carry
        block = at(block_M, cell)
        held, refcount_N = fetch(refcount_N, block)
        order = when(held == 0, lambda order: idle_list.leave(order, block), order)
        return refcount_N.at[block].set(held + 1), table_BM.at[row, cell].set(block), order

    refcount_N, table_BM, order = lax.fori_loop(
        0, hits, hold, (table.pool.refcount_N, table.table_BM, cache.order)
    )
    table = table.replace(
        pool=table.pool.replace(refcount_N=refcount_N),
        table_BM=table_BM,
        length_B=table.length_B.at[row].add(hits * table.block_size),
    )
    return table, cache.replace(order=order), fits


def make_room(
    table: BlockTable, cache: PrefixCache, blocks: jax.Array | int
) -> tuple[BlockTable, PrefixCache, jax.Array]:
    """Evicts idle blocks until ``blocks`` are free, as ``block_table.reserve`` takes no others.

    Returns ``(table', cache', fits)``. ``fits`` is False, and nothing changed, where ``room`` has
    fewer.
    """
    _demand_fit(table, cache)
    fits = blocks <= room(table, cache)
    blocks = jnp.where(fits, blocks, 0)

    def evict(carry: tuple[pools.Pool, PrefixCache]) -> tuple[pools.Pool, PrefixCache]:
        pool, cache = carry
        order, block = idle_list.leave_first(cache.order)
        pool = pools.give(pool, block[None], jnp.ones(1, bool))
        return pool, PrefixCache(prefix_index.remove(cache.index, block), order)

    pool, cache = lax.while_loop(lambda carry: carry[0].free < blocks, evict, (table.pool, cache))
    return table.replace(pool=pool), cache, fits


def admit(
    table: BlockTable,
    cache: PrefixCache,
    row: jax.Array | int,
    token_T: jax.Array,
    count: jax.Array | int,
    salt: jax.Array | int,
) -> tuple[BlockTable, PrefixCache, jax.Array, jax.Array]:
    """Room for a sequence of ``count`` tokens in an empty row: its hit, then new blocks.

    The arguments of ``match``, and the row. Returns ``(table', cache', hits, fits)``: the first
    ``hits`` blocks hold their tokens already, the caller fills the others and then may
    ``register`` them. ``fits`` is False, and nothing changed, where ``room`` has less than the
    ``need``, or where the row cannot take these tokens.
    """
    size, (rows, cells) = table.block_size, table.table_BM.shape
    block_M, hits = match(cache, token_T, count, salt)
    fits = (count > 0) & (count <= min(token_T.shape[0], cells * size))
    fits &= need(table, block_M, hits, count) <= room(table, cache)
    # A row past the end makes adopt refuse, and all that follows takes nothing.
    table, cache, fits = adopt(table, cache, jnp.where(fits, row, rows), block_M, hits)
    hits, held = jnp.where(fits, hits, 0), jnp.where(fits, blocks_of(count, size), 0)
    table, cache, _ = make_room(table, cache, held - hits)
    cell_M = jnp.arange(cells)
    new_M = (cell_M >= hits) & (cell_M < held)
    pool, block_M = pools.take(table.pool, new_M)
    table = table.replace(
        pool=pool,
        table_BM=table.table_BM.at[row, jnp.where(new_M, cell_M, cells)].set(block_M, mode="drop"),
        length_B=table.length_B.at[jnp.where(fits, row, rows)].set(count, mode="drop"),
    )
    return table, cache, hits, fits


def register(
    table: BlockTable,
    cache: PrefixCache,
    row: jax.Array | int,
    token_T: jax.Array,
    first_block: jax.Array | int,
    end_block: jax.Array | int,
    salt: jax.Array | int,
) -> tuple[PrefixCache, jax.Array]:
    """Full blocks of a row are found from now on. Blocks that are keyed already stay as they are.

    Args:
      table: the tables.
      cache: the cache.
      row: i32, the row.
      token_T: i32, its tokens from the first on.
      first_block: i32, first logical block to key.
      end_block: i32, the logical block behind the last one to key.
      salt: u32, of the row's tenant.

    Returns:
      ``(cache', valid)``. ``valid`` is False, and nothing changed, where there is no such row, a
      block is not full or not in ``token_T``, or the one before the first is not keyed for the
      tenant.
    """
    _demand_fit(table, cache)
    index, size, (rows, cells) = cache.index, table.block_size, table.table_BM.shape
    salt = jnp.asarray(salt, jnp.uint32)
    valid = jnp.asarray((row >= 0) & (row < rows))
    valid &= (first_block >= 0) & (first_block <= end_block)
    row = jnp.where(valid, row, 0)
    valid &= end_block <= jnp.minimum(table.length_B[row], token_T.shape[0]) // size
    before = table.table_BM[row, jnp.clip(first_block - 1, 0, cells - 1)]
    linked = index.keyed_N.at[before].get(mode="fill", fill_value=False)
    linked &= index.salt_N.at[before].get(mode="fill", fill_value=0) == salt
    valid &= linked | (first_block == 0)
    before_A = index.key_NA.at[before].get(mode="fill", fill_value=0)
    key_A = jnp.where(first_block > 0, before_A, keys.root(salt))
    span = first_block, jnp.where(valid, end_block, first_block)
    index = prefix_index.insert_chain(index, table.table_BM[row], token_T, span, key_A, salt)
    return cache.replace(index=index), valid


def reserve(
    table: BlockTable, cache: PrefixCache, tokens_B: jax.Array, *, most_tokens: int | None = None
) -> tuple[BlockTable, PrefixCache, block_table.Copies, jax.Array]:
    """``block_table.reserve`` that evicts idle blocks where free ones are lacking.

    A row that forked fewer tokens than its parent stores may end inside a full block, and writes
    into it once nobody else holds it: such a block is not found any more. Returns ``(table',
    cache', copies, fits)``; where ``fits`` is False nothing changed.
    """
    _demand_fit(table, cache)
    dims(tokens_B=tokens_B, table_BM=table.table_BM)
    size, row_tokens = table.block_size, table.table_BM.shape[1] * table.block_size
    most = row_tokens if most_tokens is None else most_tokens
    legal = ((tokens_B >= 0) & (tokens_B <= jnp.minimum(most, row_tokens - table.length_B))).all()
    # Refused already if it is not legal; nothing is evicted for it.
    blocks = block_table.demand(table, jnp.where(legal, tokens_B, 0))
    # The counts are read before they are written: otherwise XLA copies them (``pool.read``).
    blocks, refcount_N = lax.optimization_barrier((blocks, table.pool.refcount_N))
    table = table.replace(pool=table.pool.replace(refcount_N=refcount_N))
    table, cache, _ = make_room(table, cache, blocks)
    start_B = table.length_B
    table, copies, fits = block_table.reserve(table, tokens_B, most_tokens=most_tokens)
    writes_B = fits & (tokens_B > 0) & (start_B % size > 0)
    block_B = jnp.take_along_axis(table.table_BM, (start_B // size)[:, None], axis=1, mode="clip")
    block_B = jnp.where(writes_B, block_B[:, 0], table.pool.none)
    return table, cache.replace(index=_forget(cache.index, block_B)), copies, fits


def release(
    table: BlockTable, cache: PrefixCache, released_B: jax.Array
) -> tuple[BlockTable, PrefixCache, jax.Array]:
    """``block_table.release``, but keyed blocks that nobody holds any more become idle.

    Rows in order, each row's last block first. Returns ``(table', cache', valid)``.
    """
    _demand_fit(table, cache)
    dims(released_B=released_B, length_B=table.length_B)
    valid = (~released_B | (table.length_B > 0)).all()
    released_B = released_B & valid
    block_BM = jnp.where(released_B[:, None], table.table_BM, table.pool.none)
    pool, cache = _drop(table.pool, cache, block_BM)
    table = table.replace(
        pool=pool,
        table_BM=jnp.where(released_B[:, None], table.pool.none, table.table_BM),
        length_B=jnp.where(released_B, 0, table.length_B),
    )
    return table, cache, valid


def reorder(
    table: BlockTable, cache: PrefixCache, parent_B: jax.Array
) -> tuple[BlockTable, PrefixCache]:
    """``block_table.reorder``, but keyed blocks that nobody holds any more become idle."""
    _demand_fit(table, cache)
    dims(parent_B=parent_B, length_B=table.length_B)
    table_BM = table.table_BM[parent_B]
    pool, cache = _drop(pools.hold(table.pool, table_BM.ravel()), cache, table.table_BM)
    table = table.replace(pool=pool, table_BM=table_BM, length_B=table.length_B[parent_B])
    return table, cache


def reset(table: BlockTable, cache: PrefixCache) -> tuple[BlockTable, PrefixCache, jax.Array]:
    """Forgets every block, all of them idle. Returns ``(table', cache', done)``.

    ``done`` is False, and nothing changed, while a row holds a block. Cost: O(idle blocks).
    """
    done = room(table, cache) == table.pool.blocks
    table, cache, _ = make_room(table, cache, jnp.where(done, table.pool.blocks, 0))
    return table, cache, done


def ledger(
    table: BlockTable,
    cache: PrefixCache,
    final_B: jax.Array,
    *,
    pool_slots: jax.Array | int,
    short: jax.Array | bool = False,
) -> ledgers.Ledger:
    """``block_table.ledger`` with the slots of idle blocks as ``cached``."""
    split = block_table.ledger(table, final_B, pool_slots=pool_slots, short=short)
    cached = cache.idle * table.block_size
    return split.replace(token=split.token - cached, cached=cached)


def faults(table: BlockTable, cache: PrefixCache) -> list[str]:
    """Every broken invariant of a concrete state, in words; empty when it is sound. Host only."""
    pool, keyed_N = jax.tree.map(np.asarray, (table.pool, cache.index.keyed_N))
    idle_Z = lists.order(cache.order.links, pool.none)
    listed_N = np.isin(np.arange(pool.none), idle_Z)
    free_Z = pool.queue_N[(pool.head + np.arange(pool.free)) % pool.blocks]
    found = {
        "the count of idle blocks is wrong": cache.idle != len(idle_Z),
        "the idle list differs from the blocks keyed and unreferenced": (
            (listed_N != (keyed_N & (pool.refcount_N == 0))).any()
        ),
        "a free block is keyed": keyed_N[free_Z].any(),
        "a block is neither free nor idle nor referenced": (
            np.count_nonzero(pool.refcount_N) + pool.free + cache.idle != pool.blocks
        ),
    }
    # Without a cache every unreferenced block is free; the last line above says it with one.
    others = [fault for fault in block_table.faults(table) if not fault.startswith("a block is ne")]
    return [*others, *prefix_index.faults(cache.index), *(f for f, is_so in found.items() if is_so)]


def _most_hits(count: jax.Array | int, size: int) -> jax.Array:
    """Full blocks before the last token of a sequence: that one is computed, come what may."""
    return jnp.maximum(count - 1, 0) // size


def _forget(index: prefix_index.Index, block_B: jax.Array) -> prefix_index.Index:
    """Those of the blocks that are keyed are so no longer; mostly none is, and nothing loops."""
    keyed_B = index.keyed_N.at[block_B].get(mode="fill", fill_value=False)

    def forget(row: jax.Array, index: prefix_index.Index) -> prefix_index.Index:
        return when(keyed_B[row], lambda index: prefix_index.remove(index, block_B[row]), index)

    return lax.fori_loop(0, jnp.where(keyed_B.any(), keyed_B.shape[0], 0), forget, index)


def _drop(
    pool: pools.Pool, cache: PrefixCache, block_BM: jax.Array
) -> tuple[pools.Pool, PrefixCache]:
    """Drops a reference for every cell, the rows in order and each from its end."""
    block_Z = block_BM[:, ::-1].ravel()
    pool, last_Z = pools.drop(pool, block_Z)
    keyed_Z = cache.index.keyed_N.at[block_Z].get(mode="fill", fill_value=False)
    pool = pools.give(pool, block_Z, last_Z & ~keyed_Z)
    return pool, cache.replace(order=idle_list.join(cache.order, block_Z, last_Z & keyed_Z))


def _demand_fit(table: BlockTable, cache: PrefixCache) -> None:
    """The table and the cache are of one size; checked while tracing."""
    blocks, size = cache.index.token_NS.shape
    if (table.pool.none, table.block_size) != (blocks, size):
        raise ValueError(
            f"cache: expected {table.pool.none} blocks of {table.block_size} slots as the table"
            f" has, got {blocks} of {size}"
        )
