"""Block tables over a pool: reserve, fork and release as pure functions on fixed shapes.

Row b of ``table_BM`` maps logical to physical blocks; its first ceil(length / block size) cells
are in use, the others hold ``N``. Where layers have a window (``cache_groups``) a row may have lost
its head: its use begins at a later cell. The invariants, checked by ``faults``: a block's reference
count is the number of cells that name it, and a block nobody names stands in the free queue once.

Before a row writes into a partial last block that others hold too, ``reserve`` gives it a block
of its own and reports the copy (copy-on-write; "Efficient Memory Management for Large Language
Model Serving with PagedAttention", section 4.4). When all holders of a block write in one step,
the last of them keeps it: n holders make n - 1 copies.

Cost: ``reserve`` is O(B * W) with W the cells a row may gain, 1 for a decode step; ``fork`` and
``release`` are O(B * M), ``release_heads`` O(B) for each cell that a row loses. Nothing scans or
copies the pool, no loop runs over its blocks.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.config import MOST
from paged_jax.memory import ledger as ledgers
from paged_jax.memory import pool as pools
from paged_jax.memory.layout import blocks_of
from pallas_kernels import dims


class BlockTable(flax.struct.PyTreeNode):
    """B rows of block tables and the pool that their blocks come from."""

    pool: pools.Pool
    table_BM: jax.Array  # i32: physical block of each logical block, N where there is none
    length_B: jax.Array  # i32: tokens stored, 0 for an empty row
    block_size: int = flax.struct.field(pytree_node=False)
    first_B: jax.Array | None = None  # i32: first cell in use; None: it is 0 in every row


class Copies(flax.struct.PyTreeNode):
    """Block copies to make before a step writes; N, and to be dropped, where there is none."""

    source_C: jax.Array
    target_C: jax.Array


def create(
    *, rows: int, blocks: int, block_size: int, blocks_per_row: int, loses_heads: bool = False
) -> BlockTable:
    """An empty table of ``rows`` rows of up to ``blocks_per_row`` blocks, and its pool.

    ``loses_heads``: whether ``release_heads`` is for it.
    """
    sizes = {"rows": rows, "block_size": block_size, "blocks_per_row": blocks_per_row}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    if blocks_per_row * block_size >= MOST:
        raise ValueError(f"blocks_per_row: {blocks_per_row} of {block_size} slots pass {MOST}")
    return BlockTable(
        pool=pools.create(blocks),
        table_BM=jnp.full((rows, blocks_per_row), blocks, jnp.int32),
        length_B=jnp.zeros(rows, jnp.int32),
        block_size=block_size,
        first_B=jnp.zeros(rows, jnp.int32) if loses_heads else None,
    )


def reserve(
    state: BlockTable, tokens_B: jax.Array, *, most_tokens: int | None = None
) -> tuple[BlockTable, Copies, jax.Array]:
    """Makes room for ``tokens_B`` more tokens in each row, or for none at all.

    Args:
      state: the tables and their pool.
      tokens_B: i32, tokens that each row is about to write, 0 for rows that rest.
      most_tokens: static bound on ``tokens_B``; 1 makes a decode step cheap. Default: a full row.

    Returns:
      ``(state', copies, fits)``. ``copies`` has C = B entries. ``fits`` is False, and the state
      unchanged, when blocks are lacking, when a row would pass its M blocks, or when an entry of
      ``tokens_B`` is negative or above ``most_tokens``.
    """
    sizes = dims(tokens_B=tokens_B, table_BM=state.table_BM, length_B=state.length_B)
    _demand_dtype("tokens_B", tokens_B, jnp.integer)
    row_tokens = sizes.M * state.block_size
    most_tokens = row_tokens if most_tokens is None else min(most_tokens, row_tokens)
    if most_tokens < 1:
        raise ValueError(f"most_tokens: expected at least 1, got {most_tokens}")
    width = min(-(-most_tokens // state.block_size), sizes.M)
    none, row_B = state.pool.none, jnp.arange(sizes.B)
    held_B = blocks_of(state.length_B, state.block_size)
    gained_B = blocks_of(state.length_B + tokens_B, state.block_size) - held_B
    legal_B = (tokens_B >= 0) & (tokens_B <= most_tokens) & (held_B + gained_B <= sizes.M)

    # Writers drop their hold on a shared last block; the last of all its holders takes it back.
    writes_tail_B = (tokens_B > 0) & (state.length_B % state.block_size > 0)
    tail_B = last_block(state, writes_tail_B)
    holders_B, refcount_N = pools.read(state.pool.refcount_N, tail_B, none_value=0)
    shared_B = holders_B > 1
    shared_tail_B = jnp.where(shared_B, tail_B, none)
    pool, keeps_B = pools.drop(state.pool.replace(refcount_N=refcount_N), shared_tail_B)
    copies_B = shared_B & ~keeps_B

    grows_BW = jnp.arange(width) < gained_B[:, None]
    wanted_BW = jnp.concatenate([copies_B[:, None], grows_BW], axis=1)
    fits = legal_B.all() & (wanted_BW.sum(dtype=jnp.int32) <= pool.free)
    pool = pools.hold(pool, jnp.where(keeps_B | ~fits, shared_tail_B, none))
    pool, block_Z = pools.take(pool, (wanted_BW & fits).ravel())
    block_BW = block_Z.reshape(wanted_BW.shape)

    cell_BW = jnp.concatenate(
        [held_B[:, None] - 1, held_B[:, None] + jnp.arange(width)], axis=1, dtype=jnp.int32
    )
    cell_BW = jnp.where(wanted_BW & fits, cell_BW, sizes.M)
    state = state.replace(
        pool=pool,
        table_BM=state.table_BM.at[row_B[:, None], cell_BW].set(block_BW, mode="drop"),
        length_B=state.length_B + jnp.where(fits, tokens_B, 0),
    )
    made_B = copies_B & fits
    return state, Copies(jnp.where(made_B, tail_B, none), block_BW[:, 0]), fits


def demand(state: BlockTable, tokens_B: jax.Array) -> jax.Array:
    """Blocks that ``reserve`` of ``tokens_B`` would take, copies included, as a scalar.

    Reads only; O(B), and O(B * B) where last blocks are shared.
    """
    dims(tokens_B=tokens_B, length_B=state.length_B)
    length_B, size = state.length_B, state.block_size
    gained_B = blocks_of(length_B + tokens_B, size) - blocks_of(length_B, size)
    writes_tail_B = (tokens_B > 0) & (length_B % size > 0)
    tail_B = last_block(state, writes_tail_B)
    holders_B = state.pool.refcount_N.at[tail_B].get(mode="fill", fill_value=0)

    def copied() -> jax.Array:
        same_BB = (tail_B[:, None] == tail_B) & writes_tail_B
        everybody_B = same_BB.sum(axis=1) == holders_B
        first_B = jnp.argmax(same_BB, axis=1) == jnp.arange(tail_B.shape[0])
        return ((holders_B > 1) & ~(everybody_B & first_B)).sum(dtype=jnp.int32)

    copies = lax.cond((holders_B > 1).any(), copied, lambda: jnp.int32(0))
    return gained_B.sum(dtype=jnp.int32) + copies


def fork(
    state: BlockTable, parent_B: jax.Array, tokens_B: jax.Array | None = None
) -> tuple[BlockTable, jax.Array]:
    """Lets empty rows share the blocks of other rows.

    Args:
      state: the tables and their pool.
      parent_B: i32, the row that row b becomes a copy of, B for rows that stay as they are.
      tokens_B: i32, how many of the parent's tokens row b shares. Default: all.

    Returns:
      ``(state', fits)``. ``fits`` is False, and the state unchanged, when a child is not empty,
      when a parent is no row, or when it holds no tokens or fewer than asked for. Of a row that has
      lost its head a child may ask for all tokens only: fewer would see further back.
    """
    sizes = dims(parent_B=parent_B, table_BM=state.table_BM, length_B=state.length_B)
    _demand_dtype("parent_B", parent_B, jnp.integer)
    child_B = parent_B != sizes.B
    known_B = (parent_B >= 0) & (parent_B < sizes.B)
    parent_B = jnp.where(known_B, parent_B, 0)
    stored_B = state.length_B[parent_B]
    tokens_B = stored_B if tokens_B is None else tokens_B
    dims(tokens_B=tokens_B, length_B=state.length_B)
    _demand_dtype("tokens_B", tokens_B, jnp.integer)
    legal_B = known_B & (state.length_B == 0) & (tokens_B > 0) & (tokens_B <= stored_B)
    first_B = state.first_B
    if first_B is not None:
        legal_B &= (first_B[parent_B] == 0) | (tokens_B == stored_B)
    fits = (legal_B | ~child_B).all()
    child_B &= fits
    tokens_B = jnp.where(child_B, tokens_B, 0)
    cells_BM = jnp.arange(sizes.M) < blocks_of(tokens_B, state.block_size)[:, None]
    shared_BM = jnp.where(cells_BM, state.table_BM[parent_B], state.pool.none)
    if first_B is not None:
        first_B = jnp.where(child_B, first_B[parent_B], first_B)
    state = state.replace(
        pool=pools.hold(state.pool, shared_BM.ravel()),
        table_BM=jnp.where(child_B[:, None], shared_BM, state.table_BM),
        length_B=state.length_B + tokens_B,
        first_B=first_B,
    )
    return state, fits


def reorder(state: BlockTable, parent_B: jax.Array) -> BlockTable:
    """Every row becomes a copy of its parent, all at once: a permutation, forks and releases.

    ``parent_B``: i32, rows; row b then shares all blocks of what row ``parent_B[b]`` was. Blocks
    that no row names any more are freed. What beam search does between two steps (PagedAttention,
    section 4.4).
    """
    dims(parent_B=parent_B, length_B=state.length_B)
    _demand_dtype("parent_B", parent_B, jnp.integer)
    table_BM = state.table_BM[parent_B]
    pool = pools.hold(state.pool, table_BM.ravel())
    block_Z = state.table_BM[:, ::-1].ravel()
    pool, last_Z = pools.drop(pool, block_Z)
    return state.replace(
        pool=pools.give(pool, block_Z, last_Z),
        table_BM=table_BM,
        length_B=state.length_B[parent_B],
        first_B=None if state.first_B is None else state.first_B[parent_B],
    )


def release(state: BlockTable, released_B: jax.Array) -> tuple[BlockTable, jax.Array]:
    """Empties the rows marked in ``released_B`` (bool), their last blocks first.

    Returns ``(state', valid)``. ``valid`` is False, and the state unchanged, when a marked row is
    empty: releasing twice is an error.
    """
    dims(released_B=released_B, length_B=state.length_B)
    _demand_dtype("released_B", released_B, jnp.bool_)
    valid = (~released_B | (state.length_B > 0)).all()
    released_B = released_B & valid
    block_BM = jnp.where(released_B[:, None], state.table_BM, state.pool.none)
    block_Z = block_BM[:, ::-1].ravel()  # a sequence's tail is reused before its head
    pool, last_Z = pools.drop(state.pool, block_Z)
    state = state.replace(
        pool=pools.give(pool, block_Z, last_Z),
        table_BM=jnp.where(released_B[:, None], state.pool.none, state.table_BM),
        length_B=jnp.where(released_B, 0, state.length_B),
        first_B=None if state.first_B is None else jnp.where(released_B, 0, state.first_B),
    )
    return state, valid


def release_heads(state: BlockTable, first_B: jax.Array) -> BlockTable:
    """Releases each row's blocks before its cell ``first_B``; the other cells stay where they are.

    The last block of each row leaves first, then the one before it. Cells that were released
    before stay so; no row loses cells it does not have. For a table that ``loses_heads``.
    """
    dims(first_B=first_B, table_BM=state.table_BM, length_B=state.length_B)
    if state.first_B is None:
        raise ValueError("release_heads: the table was made to keep its rows whole")
    none, row_B = state.pool.none, jnp.arange(first_B.shape[0])
    old_B = state.first_B
    first_B = jnp.clip(first_B, old_B, blocks_of(state.length_B, state.block_size))

    def one_each(carry: tuple) -> tuple:
        pool, table_BM, left_B = carry
        cell_B = jnp.where(left_B > 0, old_B + left_B - 1, table_BM.shape[1])
        block_B = table_BM.at[row_B, cell_B].get(mode="fill", fill_value=none)
        # Read before it is written, or the table is copied in every pass.
        block_B, table_BM = lax.optimization_barrier((block_B, table_BM))
        pool, last_B = pools.drop(pool, block_B)
        table_BM = table_BM.at[row_B, cell_B].set(none, mode="drop")
        return pools.give(pool, block_B, last_B), table_BM, left_B - 1

    pool, table_BM, _ = lax.while_loop(
        lambda carry: (carry[2] > 0).any(), one_each, (state.pool, state.table_BM, first_B - old_B)
    )
    return state.replace(pool=pool, table_BM=table_BM, first_B=first_B)


def freed_by(state: BlockTable, released_B: jax.Array) -> jax.Array:
    """Blocks that would become free if the marked rows were released, as a scalar."""
    _demand_dtype("released_B", released_B, jnp.bool_)
    block_BM = jnp.where(released_B[:, None], state.table_BM, state.pool.none)
    return pools.drop(state.pool, block_BM.ravel())[1].sum(dtype=jnp.int32)


def ledger(
    state: BlockTable,
    final_B: jax.Array,
    *,
    pool_slots: jax.Array | int,
    short: jax.Array | bool = False,
) -> ledgers.Ledger:
    """The ledger of this moment.

    Args:
      state: the tables.
      final_B: i32, tokens that each row will have stored in the end.
      pool_slots: slots of the pool, at least blocks * block size.
      short: whether the queue's head was refused for want of free blocks, or somebody preempted.

    A partial block that several rows hold is filled up to its longest holder, and reserved up to
    the largest end among them. Cost: O(B), and O(B * B) where last blocks are shared, which under
    ``vmap`` is always.
    """
    dims(final_B=final_B, length_B=state.length_B)
    size, pool = state.block_size, state.pool
    held_B = state.length_B > 0
    filled_B = jnp.where(held_B, (state.length_B - 1) % size + 1, 0)
    ending_B = jnp.clip(final_B - (state.length_B - filled_B), filled_B, size)
    holders_B, _ = pools.read(pool.refcount_N, last_block(state, held_B), none_value=0)
    counted_B, filled_B, ending_B = lax.cond(
        (holders_B > 1).any(),
        lambda: _joined_ends(state, held_B, filled_B, ending_B),
        lambda: (held_B, filled_B, ending_B),
    )
    empty = jnp.where(counted_B, size - filled_B, 0).sum(dtype=jnp.int32)
    reserved = jnp.where(counted_B, ending_B - filled_B, 0).sum(dtype=jnp.int32)
    return ledgers.close(
        token=pool.used * size - empty,
        reserved=reserved,
        internal=empty - reserved,
        round_up=pool_slots - pool.blocks * size,
        unallocated=pool.free * size,
        short=short,
        stranded=False,
    )


def _joined_ends(
    state: BlockTable, held_B: jax.Array, filled_B: jax.Array, ending_B: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each last block at the first row that ends in it, with the most of all its holders."""
    size, cell_B = state.block_size, _last_cell(state)
    tail_B = last_block(state, held_B)
    starts_B = cell_B * size
    # Row i's last block in row j's table: shared blocks stand in the same cell of both.
    holds_BB = tail_B[:, None] == state.table_BM[:, cell_B].T
    holds_BB &= held_B[:, None] & (starts_B[:, None] < state.length_B)
    ends_BB = holds_BB & (cell_B == cell_B[:, None])
    stored_BB = jnp.where(ends_BB, filled_B, size)
    first_B = held_B & (jnp.argmax(ends_BB, axis=1) == jnp.arange(held_B.shape[0]))
    return (
        first_B,
        jnp.where(holds_BB, stored_BB, 0).max(axis=1),
        jnp.where(holds_BB, jnp.where(ends_BB, ending_B, size), 0).max(axis=1),
    )


def faults(state: BlockTable) -> list[str]:
    """Every broken invariant of a concrete state, in words; empty when it is sound. Host only."""
    pool = jax.tree.map(np.asarray, state.pool)
    table_BM, length_B = np.asarray(state.table_BM), np.asarray(state.length_B)
    end_B = blocks_of(length_B, state.block_size)
    first_B = np.zeros_like(end_B) if state.first_B is None else np.asarray(state.first_B)
    cell_M = np.arange(table_BM.shape[1])
    before_BM, past_BM = cell_M < first_B[:, None], cell_M >= end_B[:, None]
    named_Z = table_BM[~before_BM & ~past_BM]
    known_Z = (named_Z >= 0) & (named_Z < pool.blocks)
    counted_N = np.bincount(named_Z[known_Z], minlength=pool.none)
    free_Z = pool.queue_N[(pool.head + np.arange(pool.free)) % pool.blocks]
    known_free_Z = free_Z[(free_Z >= 0) & (free_Z < pool.blocks)]
    found = {
        "a row is longer than its blocks": (end_B > table_BM.shape[1]).any(),
        "a row begins outside its blocks": ((first_B < 0) | (first_B > end_B)).any(),
        "a cell before a row's first names a block": (table_BM[before_BM] != pool.none).any(),
        "a cell past a row's length names a block": (table_BM[past_BM] != pool.none).any(),
        "a cell within a row's length names no block": not known_Z.all(),
        "reference counts differ from the table": (counted_N != pool.refcount_N).any(),
        "the free queue names no block": len(known_free_Z) != len(free_Z),
        "a block stands in the free queue twice": len(set(free_Z)) != pool.free,
        "a free block is referenced": pool.refcount_N[known_free_Z].any(),
        "a block is neither free nor referenced": (
            np.count_nonzero(pool.refcount_N) + pool.free != pool.blocks
        ),
    }
    return [fault for fault, present in found.items() if present]


def _last_cell(state: BlockTable) -> jax.Array:
    """The last logical block of each row, 0 for an empty one."""
    return jnp.maximum(blocks_of(state.length_B, state.block_size) - 1, 0)


def last_block(state: BlockTable, rows_B: jax.Array) -> jax.Array:
    """The last physical block of the marked rows, ``pool.none`` elsewhere."""
    block_B = jnp.take_along_axis(state.table_BM, _last_cell(state)[:, None], axis=1)[:, 0]
    return jnp.where(rows_B, block_B, state.pool.none)


def _demand_dtype(name: str, array: jax.Array, kind: Any) -> None:
    if not jnp.issubdtype(array.dtype, kind):
        wanted = "bool" if kind is jnp.bool_ else "integers"
        raise ValueError(f"{name}: expected {wanted}, got {array.dtype}")
