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
    """Slots of one step, i32 scalars."""

    token: jax.Array
    reserved: jax.Array
    internal: jax.Array
    round_up: jax.Array
    stranded: jax.Array
    short: jax.Array
    cached: jax.Array
    free: jax.Array


def close(
    *,
    token: jax.Array,
    reserved: jax.Array,
    internal: jax.Array,
    round_up: jax.Array,
    unallocated: jax.Array,
    short: jax.Array | bool,
    stranded: jax.Array | bool,
) -> Ledger:
    """The ledger whose ``unallocated`` slots are free, or short or stranded for that reason."""
    zero = jnp.zeros_like(unallocated)
    return Ledger(
        token=token,
        reserved=reserved,
        internal=internal,
        round_up=round_up,
        stranded=jnp.where(stranded, unallocated, zero),
        short=jnp.where(short, unallocated, zero),
        cached=zero,
        free=jnp.where(jnp.asarray(short) | stranded, zero, unallocated),
    )
