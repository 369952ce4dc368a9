"""The buddy allocator against sets of free addresses per order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax.memory import buddy
from tests.support import allocators

BOUND = 16384
POOLS = (15744, 16384, 1, 7, 96)
MUTANTS = {
    "never coalesces": ("_buddy_of", lambda key: 0 * key + 2 * BOUND - 1),
    "coalesces with another's buddy": ("_buddy_of", lambda key: key ^ 2),
    "highest address": ("_lowest_bit", lambda word: 31 - lax.clz(word).astype(jnp.int32)),
    "order rounded down": (
        "_order",
        lambda slots: 31 - lax.clz(jnp.maximum(jnp.asarray(slots, jnp.int32), 1)),
    ),
    "free accepts anything": (
        "free",
        lambda state, address, free=buddy.free: (free(state, address)[0], jnp.bool(True)),
    ),
}


@pytest.fixture(scope="module")
def replay():
    return allocators.replayer(buddy)


@pytest.mark.parametrize("pool_slots", POOLS)
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_model(replay, pool_slots, seed):
    trace = allocators.draw(allocators.BuddyModel(pool_slots), seed)
    assert not allocators.disagreements(replay, buddy, trace, pool_slots, BOUND)


@pytest.mark.parametrize("pool_slots", [1, 96])
def test_agrees_with_model_without_a_bound(replay, pool_slots):
    trace = allocators.draw(allocators.BuddyModel(pool_slots), 0)
    assert not allocators.disagreements(replay, buddy, trace, pool_slots, None)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_disagree(monkeypatch, mutant):
    monkeypatch.setattr(buddy, *MUTANTS[mutant])
    trace = allocators.draw(allocators.BuddyModel(15744), 0)
    assert allocators.disagreements(allocators.replayer(buddy), buddy, trace, 15744, BOUND)


def test_a_trace_is_worth_replaying():
    trace = allocators.draw(allocators.BuddyModel(15744), 0)
    for frees in (True, False):
        accepted_T = trace.accepted_T[trace.frees_T == frees]
        assert accepted_T.sum() > 500
        assert (~accepted_T).sum() > 100
    assert trace.unallocated_T.min() < 15744 // 10


def test_regions():
    assert [slots for _, slots in buddy.regions(15744)] == [8192, 4096, 2048, 1024, 256, 128]
    assert buddy.regions(7) == [(0, 4), (4, 2), (6, 1)]
    assert [buddy.largest_slots(pool) for pool in POOLS] == [8192, 16384, 1, 4, 64]


def test_frees_coalesce_back_to_the_regions():
    allocate, free = jax.jit(buddy.allocate), jax.jit(buddy.free)
    state = buddy.create(15744, BOUND)
    for _ in range(123):  # every region in chunks of 128
        state, _, fits = allocate(state, 128)
        assert fits
    assert not allocate(state, 1)[2]
    for address in np.random.default_rng(0).permutation(123) * 128:
        state, valid = free(state, address)
        assert valid
    for expected, slots in buddy.regions(15744):
        state, address, fits = allocate(state, slots)
        assert fits
        assert address == expected
    assert buddy.free_slots(state) == 0


def test_smallest_order_then_lowest_address():
    allocate, free = jax.jit(buddy.allocate), jax.jit(buddy.free)
    state = buddy.create(7, BOUND)  # regions of 4, 2 and 1 slots at 0, 4 and 6
    state, address, _ = allocate(state, 1)
    assert address == 6  # the region of just the size, though lower slots are free
    state, address, _ = allocate(state, 1)
    assert address == 4
    state, address, _ = allocate(state, 2)
    assert address == 0
    state, _ = free(state, 6)
    state, address, _ = allocate(state, 1)
    assert address == 5  # the lower of 5 and 6


def test_chunk_slots():
    expected = [next(2**k for k in range(32) if 2**k >= slots) for slots in range(1, 600)]
    np.testing.assert_array_equal(buddy.chunk_slots(np.arange(1, 600)), expected)
    assert buddy.chunk_slots(2049) == 4096
    assert jax.jit(buddy.chunk_slots)(2**30) == 2**30


@pytest.mark.parametrize(("pool_slots", "bound"), [(0, None), (-4, 8), (9, 8), (2**29, None)])
def test_create_refuses(pool_slots, bound):
    with pytest.raises(ValueError, match="expected 1 <= pool_slots <= bound"):
        buddy.create(pool_slots, bound)


def test_vmap_over_pools():
    states = [buddy.create(pool_slots, 128) for pool_slots in (7, 96, 128)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    slots = jnp.array([8, 33, 128])
    stacked, address, fits = jax.jit(jax.vmap(buddy.allocate))(stacked, slots)
    assert address.tolist() == [7, 0, 0]
    assert fits.tolist() == [False, True, True]
    assert jax.jit(jax.vmap(buddy.free))(stacked, address)[1].tolist() == [False, True, True]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on CPU")
def test_loop_is_one_native_function_without_copies():
    native, copies = allocators.compiled_loop(buddy)
    assert not copies
    # Before 0.12 such loops must be tiny, unless a flag raises the bound.
    assert native or jax.__version_info__ < (0, 12)
