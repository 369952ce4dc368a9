"""Buddy allocator: contiguous chunks of 2^k slots, split on demand and coalesced when freed.

The chunks a pool can ever be cut into are the nodes of a binary tree over N = 2^K slots. They
are numbered from the leaves up, a whole order at a time:

    key(order, address) = 2N - (2N >> order) + (address >> order)
    buddy(key) = key ^ 1,  parent(key) = N + (key >> 1),  left child(key) = 2 (key - N)

so the smallest order with a free chunk, and the lowest address in it, is simply the least free key
not below the order's first one. A bitmap over keys, with a bit for every non-zero word on
each level above, finds it in log32(2N) steps without a scan, a sort or a loop.

A pool that is no power of two is cut greedily, 15744 = 8192 + 4096 + 2048 + 1024 + 256 + 128. The
buddy of such a region always reaches past the pool and is never free, hence chunks coalesce to
their region and no further. The whole state is a function of the live chunks alone: freeing what
was just allocated restores it bit for bit. Source: Knowlton 1965; Knuth, TAOCP 1, section 2.5.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.memory.loops import at, fetch, put

WORD_BITS = 32


class Buddy(flax.struct.PyTreeNode):
    """Free and live chunks of one pool; N is the power of two its bound is rounded up to."""

    free_A: jax.Array  # u32 words: the bitmap of free keys, then each level above it
    chunk_N: jax.Array  # i32: slots of the live chunk that starts at this slot, 0 where none does
    pool_slots: jax.Array  # i32: slots of the pool, any number up to N
    unallocated: jax.Array  # i32: slots in no live chunk


def create(pool_slots: int, bound: int | None = None) -> Buddy:
    """An empty pool of ``pool_slots`` slots, made on the host.

    ``bound >= pool_slots`` sizes the arrays, so that one compiled program serves several pools;
    it defaults to the pool itself. Raises ``ValueError`` when either is out of range.
    """
    bound = pool_slots if bound is None else bound
    if not 1 <= pool_slots <= bound <= 2**28:
        raise ValueError(
            "pool_slots, bound: expected 1 <= pool_slots <= bound <= 2**28, got"
            f" {pool_slots}, {bound}"
        )
    size = int(chunk_slots(bound))
    offsets, words = _levels(size)
    free_A = np.zeros(words, np.uint32)
    for address, slots in regions(pool_slots):
        order = slots.bit_length() - 1
        key = 2 * size - (2 * size >> order) + (address >> order)
        for offset in offsets:
            free_A[offset + key // WORD_BITS] |= np.uint32(1 << key % WORD_BITS)
            key //= WORD_BITS
    return Buddy(
        free_A=jnp.asarray(free_A),
        chunk_N=jnp.zeros(size, jnp.int32),
        pool_slots=jnp.int32(pool_slots),
        unallocated=jnp.int32(pool_slots),
    )


def regions(pool_slots: int) -> list[tuple[int, int]]:
    """``(address, slots)`` of each power-of-two region a pool is cut into, largest first."""
    cut, address = [], 0
    for order in reversed(range(pool_slots.bit_length())):
        if pool_slots >> order & 1:
            cut.append((address, 1 << order))
            address += 1 << order
    return cut


def largest_slots(pool_slots: int) -> int:
    """Most slots one allocation can take from an empty pool: those of its largest region."""
    return regions(pool_slots)[0][1]


def could_hold(pool_slots: int, chunk_RF: np.ndarray) -> np.ndarray:
    """Whether an empty pool holds each row's F chunks (powers of two) at once, [R] bool; host.

    Largest first: what is left of a region is always a multiple of the next chunk.
    """
    left = np.tile([slots for _, slots in regions(pool_slots)], (len(chunk_RF), 1))  # R x regions
    fits_R, row_R = np.ones(len(chunk_RF), bool), np.arange(len(chunk_RF))
    for chunk_R in np.sort(chunk_RF, axis=1)[:, ::-1].T:
        region_R = np.argmax(left >= chunk_R[:, None], axis=1)
        fits_R &= left[row_R, region_R] >= chunk_R
        left[row_R, region_R] -= chunk_R
    return fits_R


def chunk_slots(slots):
    """2^ceil(log2 slots), what an allocation of ``slots`` occupies: Python, NumPy or traced.

    Exact for 1 to 2^30; 0 and less give 0.
    """
    below = slots - 1  # its bits, smeared to the right, are those below the chunk's one bit
    for shift in (1, 2, 4, 8, 16):
        below = below | below >> shift
    return below + 1


def free_slots(state: Buddy) -> jax.Array:
    """Slots in no live chunk, whether or not one allocation could have them. O(1)."""
    return state.unallocated


def allocate(state: Buddy, slots) -> tuple[Buddy, jax.Array, jax.Array]:
    """``(state', address, fits)``: the lowest free chunk of the smallest order that suffices.

    ``fits`` is False where no free chunk is large enough, and for fewer than 1 slot; the state is
    then unchanged and the address ``pool_slots``, one past the end.
    """
    size = state.chunk_N.shape[0]
    order = jnp.minimum(_order(slots), size.bit_length())
    first = _first_key(order, size)
    # Barriers keep reads above writes: read again after one, a loop would copy the array whole.
    (found_key, found), free_A = lax.optimization_barrier(
        (_least_from(state.free_A, first, size), state.free_A)
    )
    fits = found & (slots > 0)

    def split(carry):
        free_A, key = carry
        left = 2 * (key - size)
        return _flip(free_A, left + 1, True, size), left

    # Keys rise with the order: split until the order asked for. `first` has it, so is not split.
    free_A, key = lax.while_loop(
        lambda carry: carry[1] >= _first_key(order + 1, size),
        split,
        (_flip(free_A, found_key, fits, size), jnp.where(fits, found_key, first)),
    )
    address = jnp.where(fits, key - first << order, state.pool_slots)
    chunk = jnp.where(fits, 1 << order, 0)
    cell = jnp.where(fits, address, 0)
    held, chunk_N = fetch(state.chunk_N, cell)
    state = state.replace(
        free_A=free_A,
        chunk_N=put(chunk_N, cell, jnp.where(fits, chunk, held)),
        unallocated=state.unallocated - chunk,
    )
    return state, address, fits


def free(state: Buddy, address) -> tuple[Buddy, jax.Array]:
    """``(state', valid)``: the live chunk at ``address`` coalesced with every free buddy.

    ``valid`` is False, and the state unchanged, where no live chunk starts at ``address``.
    """
    size = state.chunk_N.shape[0]
    inside = (address >= 0) & (address < state.pool_slots)
    cell = jnp.where(inside, address, 0)
    held, chunk_N = fetch(state.chunk_N, cell)
    chunk = jnp.where(inside, held, 0)
    valid = chunk > 0
    order = _order(chunk)
    root = 2 * size - 2  # its buddy, the one key of no chunk, is never free
    key = jnp.where(valid, _first_key(order, size) + (cell >> order), root)

    def merge(carry):
        free_A, key = carry
        return _flip(free_A, _buddy_of(key), True, size), size + (key >> 1)

    free_A, key = lax.while_loop(
        lambda carry: _contains(carry[0], _buddy_of(carry[1])), merge, (state.free_A, key)
    )
    state = state.replace(
        free_A=_flip(free_A, key, valid, size),
        chunk_N=put(chunk_N, cell, jnp.where(valid, 0, held)),
        unallocated=state.unallocated + chunk,
    )
    return state, valid


def _order(slots) -> jax.Array:
    return WORD_BITS - lax.clz(jnp.maximum(jnp.asarray(slots, jnp.int32) - 1, 0))


def _first_key(order, size: int) -> jax.Array:
    return 2 * size - (2 * size >> order)


def _buddy_of(key):
    return key ^ 1


def _levels(size: int) -> tuple[list[int], int]:
    """Offset of each level's first word, leaves first, and the words of all levels."""
    offsets, total, bits = [], 0, 2 * size
    while bits > 1:
        offsets.append(total)
        bits = -(-bits // WORD_BITS)
        total += bits
    return offsets, total


def _contains(free_A, key) -> jax.Array:
    return at(free_A, key >> 5) >> (key & 31).astype(jnp.uint32) & 1 != 0


def _flip(free_A, key, on, size: int) -> jax.Array:
    """Free set with the membership of ``key`` flipped where ``on``, all levels consistent."""
    for offset in _levels(size)[0]:
        index = offset + (key >> 5)
        before, free_A = fetch(free_A, index)
        after = before ^ jnp.where(on, jnp.uint32(1) << (key & 31).astype(jnp.uint32), 0)
        free_A = put(free_A, index, after)
        on = (before == 0) != (after == 0)  # only then does the word's own bit change
        key = key >> 5
    return free_A


def _least_from(free_A, key, size: int) -> tuple[jax.Array, jax.Array]:
    """Least free key not below ``key``, and whether there is one.

    On the way up each level offers the keys above the path to ``key`` in the path's own word; the
    lowest level that has any wins, so on the way down it overrides what came from above.
    """
    offsets = _levels(size)[0]
    paths, words, not_below = [], [], jnp.uint32(0xFFFFFFFF)
    for offset in offsets:
        paths.append(key >> 5)
        words.append(at(free_A, offset + (key >> 5)) & not_below << (key & 31).astype(jnp.uint32))
        key, not_below = key >> 5, jnp.uint32(0xFFFFFFFE)  # above the leaves: strictly later words
    node, found = jnp.int32(0), jnp.bool(False)
    for offset, path, word in zip(*map(reversed, (offsets, paths, words)), strict=True):
        here = word != 0
        below = at(free_A, offset + node)
        node = jnp.where(here, path, node) * WORD_BITS + _lowest_bit(jnp.where(here, word, below))
        found = found | here
        node = jnp.where(found, node, 0)
    return node, found


def _lowest_bit(word) -> jax.Array:
    return lax.population_count((word & -word) - 1).astype(jnp.int32)
