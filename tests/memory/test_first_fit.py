"""The first-fit allocator against a sorted list of intervals."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import buddy, first_fit
from tests.support import allocators

BOUND = 16384


def forgets_to_unlink(state, address):
    freed, valid = first_fit.free(state, address)
    return dataclasses.replace(state, unallocated=freed.unallocated), valid


def passes_over_the_last_slot(state, slots):
    smaller = dataclasses.replace(state, pool_slots=state.pool_slots - 1)
    after, address, fits = first_fit.allocate(smaller, slots)
    after = dataclasses.replace(after, pool_slots=state.pool_slots)
    return after, jnp.where(fits, address, state.pool_slots), fits


def takes_the_gap_at_the_end(state, slots):
    start = jnp.where(
        state.previous_Z[-1] == BOUND, 0, state.previous_Z[-1] + state.chunk_Z[state.previous_Z[-1]]
    )
    fits = (slots > 0) & (state.pool_slots - start >= slots)
    after, address, _ = first_fit.allocate(state, jnp.where(fits, slots, 0))
    return after, jnp.where(fits, start, address), fits


def frees_anything(state, address):
    return first_fit.free(state, address)[0], jnp.bool(True)


MUTANTS = {
    "free": (forgets_to_unlink, frees_anything),
    "allocate": (passes_over_the_last_slot, takes_the_gap_at_the_end),
}


@pytest.fixture(scope="module")
def replay():
    return allocators.replayer(first_fit)


@pytest.mark.parametrize("pool_slots", [15744, 16384, 1, 7, 96])
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_model(replay, pool_slots, seed):
    trace = allocators.draw(allocators.FirstFitModel(pool_slots), seed)
    assert not allocators.disagreements(replay, first_fit, trace, pool_slots, BOUND)


@pytest.mark.parametrize("pool_slots", [1, 96])
def test_agrees_with_model_without_a_bound(replay, pool_slots):
    trace = allocators.draw(allocators.FirstFitModel(pool_slots), 0)
    assert not allocators.disagreements(replay, first_fit, trace, pool_slots, None)


@pytest.mark.parametrize(
    ("verb", "fault"), [(verb, fault) for verb, faults in MUTANTS.items() for fault in faults]
)
def test_mutants_disagree(verb, fault):
    verbs = {name: getattr(first_fit, name) for name in ("create", "allocate", "free")}
    mutant = types.SimpleNamespace(**verbs | {verb: fault}, free_slots=first_fit.free_slots)
    trace = allocators.draw(allocators.FirstFitModel(15744), 0)
    assert allocators.disagreements(allocators.replayer(mutant), mutant, trace, 15744, BOUND)


def test_frees_merge_into_one_gap():
    allocate, free = jax.jit(first_fit.allocate), jax.jit(first_fit.free)
    state = first_fit.create(96, BOUND)
    for _ in range(32):
        state, _, fits = allocate(state, 3)
        assert fits
    assert not allocate(state, 1)[2]
    for address in np.random.default_rng(0).permutation(32) * 3:
        state, valid = free(state, address)
        assert valid
    _, address, fits = allocate(state, 96)
    assert fits
    assert address == 0


@pytest.mark.parametrize("allocator", [first_fit, buddy])
def test_free_slots_may_be_stranded(allocator):
    allocate, free = jax.jit(allocator.allocate), jax.jit(allocator.free)
    state = allocator.create(16, BOUND)
    for _ in range(4):
        state, _, _ = allocate(state, 4)
    for address in (0, 8):
        state, _ = free(state, address)
    assert allocator.free_slots(state) == 8
    assert not allocate(state, 8)[2]


def test_sizes():
    assert first_fit.largest_slots(15744) == 15744
    assert first_fit.chunk_slots(2049) == 2049


@pytest.mark.parametrize(("pool_slots", "bound"), [(0, None), (9, 8), (2**30, None)])
def test_create_refuses(pool_slots, bound):
    with pytest.raises(ValueError, match="expected 1 <= pool_slots <= bound"):
        first_fit.create(pool_slots, bound)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA's loops on CPU")
def test_loop_is_one_native_function_without_copies():
    native, copies = allocators.compiled_loop(first_fit)
    assert not copies
    # Before 0.12 such loops must be tiny, unless a flag raises the bound.
    assert native or jax.__version_info__ < (0, 12)
