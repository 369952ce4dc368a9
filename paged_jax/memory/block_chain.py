"""Chains of blocks: block tables read from their tails, for scalar loops.

A block's predecessor is the same in every table that names it, so all tables over a pool together
are a forest: ``previous_N`` leads from a sequence's last block to its first, and its last block is
its whole table. Two sequences share a prefix exactly when their chains meet.

Cost: O(1) for each block taken, held or dropped; memory O(blocks), whatever the tables' length.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory import pool as pools
from paged_jax.memory.loops import repeat


class Chains(flax.struct.PyTreeNode):
    """A pool and the order of its used blocks."""

    pool: pools.Pool
    previous_N: jax.Array  # i32: the block before this one in its sequences, N before the first


def create(blocks: jax.Array, bound: int) -> Chains:
    """No chains, over a pool of ``blocks`` free blocks in arrays of length ``bound``."""
    return Chains(pools.create(blocks, bound), jnp.full(bound, bound, jnp.int32))


def extend(
    chains: Chains, tail: jax.Array, count: jax.Array | int, references: jax.Array | int
) -> tuple[Chains, jax.Array]:
    """Hangs ``count`` new blocks behind ``tail``. Returns ``(chains', last block)``."""

    def take(_: jax.Array, carry: tuple) -> tuple:
        pool, previous_N, tail = carry
        pool, block = pools.take_one(pool, references)
        return pool, previous_N.at[block].set(tail), block

    pool, previous_N, tail = repeat(count, take, (chains.pool, chains.previous_N, tail))
    return Chains(pool, previous_N), tail


def hold(chains: Chains, tail: jax.Array, references: jax.Array | int) -> Chains:
    """Adds references to a block and to all before it."""

    def add(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        block, refcount_N = carry
        return chains.previous_N[block], refcount_N.at[block].add(references)

    none = chains.pool.none
    _, refcount_N = lax.while_loop(
        lambda carry: carry[0] != none, add, (tail, chains.pool.refcount_N)
    )
    return chains.replace(pool=chains.pool.replace(refcount_N=refcount_N))


def drop(chains: Chains, tail: jax.Array) -> tuple[Chains, jax.Array, jax.Array]:
    """Drops a reference to each block of a chain, the last block first.

    Returns ``(chains', freed, tail_freed)``: blocks that became free, and whether ``tail`` did.
    """

    def drop_next(carry: tuple) -> tuple:
        block, pool, freed = carry
        before = chains.previous_N[block]
        pool, is_free = pools.drop_one(pool, block)
        return before, pool, freed + is_free

    none, before = chains.pool.none, chains.previous_N[tail]
    pool, tail_freed = pools.drop_one(chains.pool, tail)
    _, pool, freed = lax.while_loop(
        lambda carry: carry[0] != none, drop_next, (before, pool, tail_freed.astype(jnp.int32))
    )
    return chains.replace(pool=pool), freed, tail_freed


def replace_tail(chains: Chains, tail: jax.Array) -> tuple[Chains, jax.Array]:
    """Copy-on-write of a chain's last block: one reference to it gives way to a new block."""
    pool, _ = pools.drop_one(chains.pool, tail)
    return extend(chains.replace(pool=pool), chains.previous_N[tail], 1, 1)


def block_before(chains: Chains, tail: jax.Array, count: jax.Array) -> jax.Array:
    """The block ``count`` places before ``tail``."""
    return repeat(count, lambda _, block: chains.previous_N[block], tail)


def tables(chains: Chains, tail_B: np.ndarray) -> list[np.ndarray]:
    """The block tables of chains that end in ``tail_B``, first block first. Host only."""
    none = chains.pool.none
    previous_N = np.append(np.asarray(chains.previous_N), none)
    backwards, rows = [], len(tail_B)
    while (tail_B != none).any():
        backwards.append(tail_B)
        tail_B = previous_N[tail_B]
    table_BM = np.array(backwards[::-1], np.int64).T.reshape(rows, len(backwards))
    return [table_M[table_M != none] for table_M in table_BM]
