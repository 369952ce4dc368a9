"""First-fit allocator: contiguous chunks of exactly the slots asked for, lowest gap first.

Live chunks form a circular doubly linked list in address order. A node's index is its chunk's
first slot and the last node, Z - 1, is the head, so an address finds its node without a search;
a gap is what lies between one chunk's end and the next one's start, hence gaps merge by themselves.

Nothing is rounded up: whatever this allocator leaves unused is free, and where a request fits the
free total but no gap, the fragmentation is measured, not defined. The whole state is a function
of the live chunks alone: freeing what was just allocated restores it bit for bit.
Source: Knuth, TAOCP 1, section 2.5. Cost: allocate O(live chunks below the gap), free O(1).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory.loops import at, put


class FirstFit(flax.struct.PyTreeNode):
    """Live chunks of one pool; Z is the bound on its slots plus one for the list's head."""

    chunk_Z: jax.Array  # i32: slots of the live chunk that starts at this slot, 0 where none does
    next_Z: jax.Array  # i32: start of the next live chunk, the head after the last; or the head
    previous_Z: jax.Array  # i32: the same, backwards
    pool_slots: jax.Array  # i32: slots of the pool, at most Z - 1
    unallocated: jax.Array  # i32: slots in no live chunk


def create(pool_slots: int, bound: int | None = None) -> FirstFit:
    """An empty pool of ``pool_slots`` slots.

    ``bound >= pool_slots`` sizes the arrays, so that one compiled program serves several pools;
    it defaults to the pool itself. Raises ``ValueError`` when either is out of range.
    """
    bound = pool_slots if bound is None else bound
    if not 1 <= pool_slots <= bound < 2**30:
        raise ValueError(
            "pool_slots, bound: expected 1 <= pool_slots <= bound < 2**30, got"
            f" {pool_slots}, {bound}"
        )
    return FirstFit(
        chunk_Z=jnp.zeros(bound + 1, jnp.int32),
        next_Z=jnp.full(bound + 1, bound, jnp.int32),
        previous_Z=jnp.full(bound + 1, bound, jnp.int32),
        pool_slots=jnp.int32(pool_slots),
        unallocated=jnp.int32(pool_slots),
    )


def largest_slots(pool_slots: int) -> int:
    """Most slots one allocation can take from an empty pool: all of them."""
    return pool_slots


def could_hold(pool_slots: int, chunk_RF: np.ndarray) -> np.ndarray:
    """Whether an empty pool holds each row's F chunks at once, [R] bool; host."""
    return chunk_RF.sum(axis=1, dtype=np.int64) <= pool_slots


def chunk_slots(slots):
    """What an allocation of ``slots`` occupies: exactly that."""
    return slots


def free_slots(state: FirstFit) -> jax.Array:
    """Slots in no live chunk, whether or not one allocation could have them. O(1)."""
    return state.unallocated


def allocate(state: FirstFit, slots) -> tuple[FirstFit, jax.Array, jax.Array]:
    """``(state', address, fits)``: the start of the lowest gap of at least ``slots``.

    ``fits`` is False where no gap is large enough, and for fewer than 1 slot; the state is then
    unchanged and the address ``pool_slots``, one past the end.
    """
    head = state.chunk_Z.shape[0] - 1

    def too_small(gap):
        start, after = gap
        return (after != head) & (after - start < slots)

    def advance(gap):
        _, after = gap
        return after + at(state.chunk_Z, after), at(state.next_Z, after)

    start, after = lax.while_loop(too_small, advance, (jnp.int32(0), at(state.next_Z, head)))
    before = at(state.previous_Z, after)
    (start, before, after), arrays = _fence((start, before, after), state)
    chunk_Z, next_Z, previous_Z = arrays
    end = jnp.where(after == head, state.pool_slots, after)
    fits = (slots > 0) & (end - start >= slots)
    chunk = jnp.where(fits, jnp.asarray(slots, jnp.int32), 0)
    # Where nothing fits, each cell is written with what it already holds.
    cell = jnp.where(fits, start, head)
    left, right = jnp.where(fits, start, before), jnp.where(fits, start, after)
    state = state.replace(
        chunk_Z=put(chunk_Z, cell, chunk),
        next_Z=put(put(next_Z, left, after), before, right),
        previous_Z=put(put(previous_Z, right, before), after, left),
        unallocated=state.unallocated - chunk,
    )
    return state, jnp.where(fits, start, state.pool_slots), fits


def free(state: FirstFit, address) -> tuple[FirstFit, jax.Array]:
    """``(state', valid)``: the live chunk at ``address`` unlinked from the list.

    ``valid`` is False, and the state unchanged, where no live chunk starts at ``address``.
    """
    head = state.chunk_Z.shape[0] - 1
    cell = jnp.where((address >= 0) & (address < state.pool_slots), address, head)
    chunk = at(state.chunk_Z, cell)
    cell = jnp.where(chunk > 0, cell, head)
    before, after = at(state.previous_Z, cell), at(state.next_Z, cell)
    (cell, chunk, before, after), arrays = _fence((cell, chunk, before, after), state)
    chunk_Z, next_Z, previous_Z = arrays
    valid = chunk > 0
    # Where nothing is freed, the head is written with what it already holds.
    left, right = jnp.where(valid, before, head), jnp.where(valid, after, head)
    state = state.replace(
        chunk_Z=put(chunk_Z, cell, 0),
        next_Z=put(put(next_Z, cell, jnp.where(valid, head, after)), before, right),
        previous_Z=put(put(previous_Z, cell, jnp.where(valid, head, before)), after, left),
        unallocated=state.unallocated + chunk,
    )
    return state, valid


def _fence(values, state: FirstFit):
    """The values read, and the arrays to write: read again after a write, one would be copied."""
    arrays = (state.chunk_Z, state.next_Z, state.previous_Z)
    return lax.optimization_barrier((values, arrays))
