"""The pool: reference counts and a first-in, first-out queue of free blocks.

A block is free exactly when its reference count is 0, and then stands in the queue once: free and
used blocks partition the pool. The queue is a ring, so taking k blocks costs O(k) and no operation
scans, sorts or copies the pool. ``blocks`` is a traced value up to the arrays' length, so that one
compiled program serves pools of every size. No block is written as the arrays' length, one past
the end: ``-1`` would wrap around.

Order of reuse: a freed block goes to the queue's tail, the longest free leaves first.
Cost: O(cells) per call, independent of the pool's size.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.memory.loops import fetch


class Pool(flax.struct.PyTreeNode):
    """Blocks and who holds them."""

    refcount_N: jax.Array  # i32: table entries that point at a block
    queue_N: jax.Array  # i32: free blocks, a ring that starts at ``head``
    head: jax.Array  # i32: place in the ring of the block free for longest
    free: jax.Array  # i32: free blocks
    blocks: jax.Array  # i32: blocks of the pool, at most N

    @property
    def none(self) -> int:
        """The index that stands for no block."""
        return self.refcount_N.shape[0]

    @property
    def used(self) -> jax.Array:
        """Blocks with a reference."""
        return self.blocks - self.free


def create(blocks: int | jax.Array, bound: int | None = None) -> Pool:
    """A pool of ``blocks`` free blocks in ascending order, in arrays of length ``bound``.

    ``bound`` defaults to ``blocks``, then a Python integer. Raises ``ValueError`` for a number of
    blocks below 1 or above the bound, where it is known.
    """
    most_blocks = blocks if bound is None else bound
    illegal = not 1 <= blocks <= most_blocks if isinstance(blocks, int) else bound is None
    if illegal:
        most = "" if bound is None else f" and at most {bound}"
        raise ValueError(f"blocks: expected an integer of at least 1{most}, got {blocks!r}")
    bound = int(blocks) if bound is None else bound
    return Pool(
        refcount_N=jnp.zeros(bound, jnp.int32),
        queue_N=jnp.arange(bound, dtype=jnp.int32),
        head=jnp.int32(0),
        free=jnp.int32(blocks),
        blocks=jnp.int32(blocks),
    )


def take(pool: Pool, wanted_Z: jax.Array) -> tuple[Pool, jax.Array]:
    """Takes one block, with one reference, for every true cell of ``wanted_Z``, in cell order.

    Returns ``(pool', block_Z)``, ``pool.none`` where nothing was wanted. The caller has made sure
    that enough blocks are free.
    """
    rank_Z = jnp.cumsum(wanted_Z, dtype=jnp.int32) - 1
    block_Z = jnp.where(wanted_Z, pool.queue_N[_place(pool, rank_Z)], pool.none)
    count = rank_Z[-1] + 1
    pool = pool.replace(
        refcount_N=pool.refcount_N.at[block_Z].set(1, mode="drop"),
        head=_place(pool, count),
        free=pool.free - count,
    )
    return pool, block_Z


def hold(pool: Pool, block_Z: jax.Array) -> Pool:
    """Adds one reference for every cell that names a block."""
    return pool.replace(refcount_N=pool.refcount_N.at[block_Z].add(1, mode="drop"))


def drop(pool: Pool, block_Z: jax.Array) -> tuple[Pool, jax.Array]:
    """Drops one reference for every cell that names a block.

    Returns ``(pool', last_Z)``: for each block that nobody holds now, true at the highest of its
    cells. Such a block is in nobody's hands: the caller gives it a reference back or ``give``s it.
    """
    refcount_N = pool.refcount_N.at[block_Z].add(-1, mode="drop")
    left_Z, refcount_N = read(refcount_N, block_Z, none_value=1)
    emptied_Z = left_Z == 0
    # A count of 0 is free to carry the election: the most negative claim is the highest cell.
    claim_Z = -1 - jnp.arange(block_Z.shape[0], dtype=jnp.int32)
    block_Z = jnp.where(emptied_Z, block_Z, pool.none)
    refcount_N = refcount_N.at[block_Z].min(claim_Z, mode="drop")
    claimed_Z, refcount_N = read(refcount_N, block_Z, none_value=0)
    pool = pool.replace(refcount_N=refcount_N.at[block_Z].set(0, mode="drop"))
    return pool, claimed_Z == claim_Z


def give(pool: Pool, block_Z: jax.Array, freed_Z: jax.Array) -> Pool:
    """Puts the blocks of the true cells, which hold no reference, at the queue's tail in order."""
    rank_Z = pool.free + jnp.cumsum(freed_Z, dtype=jnp.int32) - 1
    place_Z = jnp.where(freed_Z, _place(pool, rank_Z), pool.none)
    return pool.replace(
        queue_N=pool.queue_N.at[place_Z].set(block_Z, mode="drop"),
        free=rank_Z[-1] + 1,
    )


def take_one(pool: Pool, references: jax.Array | int = 1) -> tuple[Pool, jax.Array]:
    """``take`` for one cell and a scalar loop. Returns ``(pool', block)``."""
    block = pool.queue_N[pool.head]
    pool = pool.replace(
        refcount_N=pool.refcount_N.at[block].set(references),
        head=_place(pool, 1),
        free=pool.free - 1,
    )
    return pool, block


def drop_one(pool: Pool, block: jax.Array) -> tuple[Pool, jax.Array]:
    """Drops one reference to ``block`` and frees it with the last. Returns ``(pool', freed)``."""
    held, refcount_N = fetch(pool.refcount_N, block)
    left = held - 1
    freed = left == 0
    # A block still held is written there too: a place past the last free block is never read.
    pool = pool.replace(
        refcount_N=refcount_N.at[block].set(left),
        queue_N=pool.queue_N.at[_place(pool, pool.free)].set(block),
        free=pool.free + freed,
    )
    return pool, freed


def read(array_N: jax.Array, at_Z: jax.Array, none_value: int) -> tuple[jax.Array, jax.Array]:
    """Values at ``at_Z``, ``none_value`` past the end, and the array to write to from then on.

    The fence makes the read come before those writes: without it XLA may keep the old array for
    the read and copy the whole pool, every step.
    """
    value_Z = array_N.at[at_Z].get(mode="fill", fill_value=none_value)
    return jax.lax.optimization_barrier((value_Z, array_N))


def _place(pool: Pool, rank: jax.Array | int) -> jax.Array:
    """Place in the ring of the block ``rank`` places behind the head, 0 <= rank <= blocks."""
    place = pool.head + rank
    return jnp.where(place >= pool.blocks, place - pool.blocks, place)
