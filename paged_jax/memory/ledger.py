"""The ledger: every slot of the pool in exactly one of eight categories.

==============  ================================================================================
``token``       holds a token that a live row can read, once however many rows share it
``reserved``    promised to a row, and its later tokens will fill it
``internal``    promised to a row, and no token will ever fill it
``round_up``    inside an allocator's chunk beyond the promise, or a pool's remainder below a block
``stranded``    free while the queue's head was refused although enough is free in all
``short``       free while the queue's head was refused for want of free room, or after preemption
``cached``      blocks that nobody holds, kept for prefix hits
``free``        the rest
==============  ================================================================================

The eight sum to the pool, exactly. Recorded after admission and before rows finish. The paper's
"external fragmentation & others" (PagedAttention, Figure 2) is round_up + stranded + short; what
fragmentation alone costs is round_up + stranded, 0 for blocks that divide the pool.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.memory import block_table as tables
from paged_jax.memory.layout import blocks_of
from pallas_kernels import dims

CATEGORIES = (
    "token",
    "reserved",
    "internal",
    "round_up",
    "stranded",
    "short",
    "cached",
    "free",
)


class Ledger(flax.struct.PyTreeNode):
    """Slots of one step, i32 scalars, and how many table entries there are to them."""

    token: jax.Array
    reserved: jax.Array
    internal: jax.Array
    round_up: jax.Array
    stranded: jax.Array
    short: jax.Array
    cached: jax.Array
    free: jax.Array


def of_paged(
    state: tables.BlockTable,
    final_B: jax.Array,
    *,
    pool_slots: jax.Array | int,
    short: jax.Array | bool = False,
) -> Ledger:
    """The ledger of block tables.

    Args:
      state: the tables.
      final_B: i32, tokens that each row will have stored in the end.
      pool_slots: slots of the pool, at least blocks * block size.
      short: whether the queue's head was refused for want of free blocks, or somebody preempted.

    A partial block that several rows hold is filled up to its longest holder, and reserved up to
    the largest end among them. Cost: O(B), and O(B * B) in steps with shared last blocks.
    """
    dims(final_B=final_B, table_BM=state.table_BM, length_B=state.length_B)
    size, pool = state.block_size, state.pool
    cell_B = jnp.maximum(blocks_of(state.length_B, size) - 1, 0)
    held_B = state.length_B > 0
    tail_B = jnp.take_along_axis(state.table_BM, cell_B[:, None], axis=1)[:, 0]
    filled_B = state.length_B - cell_B * size
    final_B = jnp.clip(final_B - cell_B * size, filled_B, size)

    def joined() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Last blocks that are shared, each at the first row that ends in it."""
        other_BB = tail_B[:, None] == state.table_BM[:, cell_B].T
        other_BB &= held_B & (cell_B[:, None] * size < state.length_B)
        stored_BB = jnp.clip(state.length_B - cell_B[:, None] * size, 0, size)
        row_B = jnp.arange(held_B.shape[0])
        ends_here_BB = other_BB & (cell_B == cell_B[:, None])
        first_B = held_B & (jnp.argmax(ends_here_BB, axis=1) == row_B)
        return (
            first_B,
            jnp.where(other_BB, stored_BB, 0).max(axis=1),
            jnp.where(other_BB, jnp.where(ends_here_BB, final_B, size), 0).max(axis=1),
        )

    holders_B = pool.refcount_N.at[jnp.where(held_B, tail_B, pool.none)].get(
        mode="fill", fill_value=0
    )
    counted_B, filled_B, final_B = jax.lax.cond(
        (holders_B > 1).any(), joined, lambda: (held_B, filled_B, final_B)
    )
    empty_slots = jnp.where(counted_B, size - filled_B, 0).sum()
    reserved = jnp.where(counted_B, final_B - filled_B, 0).sum()
    unallocated = pool.free * size
    zero = jnp.zeros_like(unallocated)
    return Ledger(
        token=pool.used * size - empty_slots,
        reserved=reserved,
        internal=empty_slots - reserved,
        round_up=pool_slots - pool.blocks * size,
        stranded=zero,
        short=jnp.where(short, unallocated, 0),
        cached=zero,
        free=jnp.where(short, 0, unallocated),
    )
