"""Block tables inside vmap, scan and donation, and what XLA makes of them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.memory import block_table as tables
from paged_jax.memory import pool as pools
from tests.support.paged_lists import PagedLists, counts, same

ROWS, BLOCKS, CELLS = 5, 12, 6


def empty(blocks: int = BLOCKS) -> tables.BlockTable:
    return tables.create(rows=ROWS, blocks=blocks, block_size=3, blocks_per_row=CELLS)


def round_of_verbs(state: tables.BlockTable, tokens_B: jax.Array) -> tuple:
    """All verbs one after the other, and everything they answer."""
    state, copies, fits = tables.reserve(state, tokens_B)
    idle_B = state.length_B == 0
    state, shared = tables.fork(state, jnp.where(idle_B & (tokens_B == 0), 0, ROWS))
    freed = tables.freed_by(state, tokens_B > 2)
    state, valid = tables.release(state, tokens_B > 2)
    return state, copies, fits, shared, freed, valid


def test_two_tables_under_vmap_are_two_tables():
    singly, batched = jax.jit(round_of_verbs), jax.jit(jax.vmap(round_of_verbs))
    states = [singly(empty(), counts([4, 0, 1, 2, 0]))[0], empty()]
    tokens = [counts([0, 2, 1, 7, 0]), counts([13, 9, 0, 12, 9])]
    expected = [singly(state, new) for state, new in zip(states, tokens, strict=True)]
    assert [bool(fits) for _, _, fits, *_ in expected] == [True, False]
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *both) for both in (states, tokens)]
    both = batched(*stacked)
    for index in range(2):
        assert same(expected[index], jax.tree.map(lambda leaf, at=index: leaf[at], both))


def test_scan_over_steps_is_one_step_after_the_other():
    def step(state: tables.BlockTable, nothing: None) -> tuple:
        return tables.reserve(state, (state.length_B > 0).astype(jnp.int32), most_tokens=1)[::2]

    def run(state: tables.BlockTable) -> tuple:
        state, _, _ = tables.reserve(state, counts([2, 0, 0, 3, 0]))
        state, _ = tables.fork(state, counts([ROWS, 0, 0, ROWS, 3]))
        return lax.scan(step, state, length=9)

    model = PagedLists(rows=ROWS, blocks=BLOCKS, block_size=3, blocks_per_row=CELLS)
    model.reserve([2, 0, 0, 3, 0])
    model.fork({1: (0, 2), 2: (0, 2), 4: (3, 3)})
    fitting = [model.reserve([1] * ROWS) is not None for _ in range(9)]
    state, fits = jax.jit(run)(empty())
    assert fits.tolist() == fitting
    assert 0 < sum(fitting) < 9
    assert state.length_B.tolist() == model.lengths()
    for table_M, table in zip(state.table_BM.tolist(), model.tables, strict=True):
        assert table_M == table + [BLOCKS] * (CELLS - len(table))


def test_donated_state_is_written_in_place():
    state = empty()
    before = [leaf.unsafe_buffer_pointer() for leaf in (state.pool.queue_N, state.table_BM)]
    step = jax.jit(tables.reserve, donate_argnums=0)
    after, _, fits = step(state, counts([4, 0, 0, 0, 1]))
    assert fits
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert [leaf.unsafe_buffer_pointer() for leaf in (after.pool.queue_N, after.table_BM)] == before
    assert tables.faults(after) == []


def copies_of_the_pool() -> list[str]:
    """Copies of arrays of N in the loop body of compiled steps that use every verb."""

    def step(state: tables.BlockTable, nothing: None) -> tuple:
        state, _, _ = tables.reserve(state, (state.length_B < 9).astype(jnp.int32), most_tokens=1)
        state, _ = tables.release(state, state.length_B == 9)
        return tables.fork(state, jnp.where(state.length_B == 0, 1, ROWS))

    run = jax.jit(lambda state: lax.scan(step, state, length=9), donate_argnums=0)
    text = run.lower(empty(blocks=4099)).compile().as_text()
    assert text is not None
    assert "s32[4099]" in text
    return re.findall(r"s32\[4099\]\S* copy\(.*", text[: text.index("\nENTRY")])


def test_steps_in_a_loop_never_copy_the_pool():
    assert copies_of_the_pool() == []


def test_steps_without_the_fence_copy_the_pool(monkeypatch):
    def read(array_N: jax.Array, at_Z: jax.Array, none_value: int) -> tuple:
        return array_N.at[at_Z].get(mode="fill", fill_value=none_value), array_N

    monkeypatch.setattr(pools, "read", read)
    assert copies_of_the_pool() != []
