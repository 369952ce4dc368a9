"""Arithmetic of allocation, sharing and copy-on-write, case by case.

The cases are those that vLLM's own tests hold its block managers to, restated: many of them side
by side, in the rows of one table.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import block_table as tables
from tests.support.paged_lists import Contents, counts, same

ROWS, CELLS = 18, 260
BLOCKS = ROWS * CELLS
reserve = jax.jit(tables.reserve)
fork = jax.jit(tables.fork)
release = jax.jit(tables.release)


def ceil_div(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def empty(block_size: int) -> tables.BlockTable:
    return tables.create(rows=ROWS, blocks=BLOCKS, block_size=block_size, blocks_per_row=CELLS)


def rows_of(values: list[int], fill: int = 0) -> jax.Array:
    return counts(values + [fill] * (ROWS - len(values)))


def store(state: tables.BlockTable, tokens: list[int]) -> tuple[tables.BlockTable, tables.Copies]:
    state, copies, fits = reserve(state, rows_of(tokens))
    assert fits
    return state, copies


def blocks_held(state: tables.BlockTable) -> list[list[int]]:
    """The blocks that each row's table names."""
    return [[block for block in row if block != BLOCKS] for row in state.table_BM.tolist()]


@pytest.mark.parametrize("block_size", [1, 8])
def test_append_takes_what_the_length_needs(block_size):
    """Prompts of 1, 7, 8 tokens; 1, 8, 129 more, and 0 or 10 slots ahead of them."""
    cases = list(itertools.product([1, 7, 8], [1, 8, 129], [0, 10]))
    before, _ = store(empty(block_size), [prompt for prompt, _, _ in cases])
    after, copies = store(before, [appended + ahead for _, appended, ahead in cases])
    gained = []
    for (prompt, appended, ahead), old, new in zip(
        cases, blocks_held(before), blocks_held(after), strict=True
    ):
        assert len(old) == ceil_div(prompt, block_size)
        gained.append(ceil_div(prompt + appended + ahead, block_size) - len(old))
        assert new[: len(old)] == old
        assert len(new) == len(old) + gained[-1]
    assert before.pool.free - after.pool.free == sum(gained)
    assert np.asarray(copies.target_C).min() == BLOCKS


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("first", [1, 16, 129])
def test_any_chunking_holds_the_same_in_as_many_blocks(block_size, first):
    """1, 16, 129 tokens more: 1, 4, or 129 at a time."""
    cases = list(itertools.product([1, 16, 129], [1, 4, 129]))
    plans = [
        [first] + [min(chunk, more - begun) for begun in range(0, more, chunk)]
        for more, chunk in cases
    ]
    contents, state = Contents(BLOCKS, block_size), empty(block_size)
    histories: list[list[int]] = [[] for _ in cases]
    for step in itertools.zip_longest(*plans, fillvalue=0):
        stored = list(map(len, histories))
        state, copies = store(state, list(step))
        for row, new in enumerate(step):
            histories[row] += range(1000 * row + stored[row], 1000 * row + stored[row] + new)
        contents.write(state, copies, stored, histories)
    for row, (more, _) in enumerate(cases):
        written = list(range(1000 * row, 1000 * row + first + more))
        assert contents.read(state)[row] == written
        assert len(blocks_held(state)[row]) == ceil_div(first + more, block_size)


def small() -> tables.BlockTable:
    """10 blocks of 16 slots."""
    return tables.create(rows=2, blocks=10, block_size=16, blocks_per_row=10)


def test_decode_fills_the_last_block_first():
    state = small()
    for tokens, blocks in [(55, [0, 1, 2, 3]), (4, [0, 1, 2, 3]), (19, [0, 1, 2, 3, 4])]:
        state, _, fits = reserve(state, counts([tokens, 0]))
        assert fits
        assert state.table_BM[0].tolist() == blocks + [10] * (10 - len(blocks))
    assert state.length_B.tolist() == [78, 0]


def test_release_frees_the_tail_first():
    state, _, _ = reserve(small(), counts([55, 0]))
    state, _ = release(state, jnp.array([True, False]))
    state, _, fits = reserve(state, counts([0, 160]))
    assert fits
    assert state.table_BM[1].tolist() == [4, 5, 6, 7, 8, 9, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "tokens", [[1, 0], [0, 1], [1, 1], [-1, 0]], ids=["first", "second", "both", "negative"]
)
def test_a_full_pool_takes_nothing(tokens):
    full, _, fits = reserve(small(), counts([80, 80]))
    assert fits
    after, copies, fits = reserve(full, counts(tokens))
    assert not fits
    assert same(full, after)
    assert copies.source_C.tolist() == copies.target_C.tolist() == [10, 10]


def test_one_row_too_long_refuses_all():
    after, _, fits = reserve(small(), counts([1, 161]))
    assert not fits
    assert same(small(), after)


def test_the_same_rows_five_times():
    state = small()
    for _ in range(5):
        state, _, fits = reserve(state, counts([90, 60]))
        assert fits
        assert state.pool.free == 0
        state, valid = release(state, jnp.array([True, True]))
        assert valid
        assert state.pool.free == 10
    assert tables.faults(state) == []


def test_release_of_nothing():
    state, _, _ = reserve(small(), counts([55, 0]))
    after, valid = release(state, jnp.array([False, False]))
    assert valid
    assert same(state, after)
    for marked in ([False, True], [True, True]):  # an empty row among them: nobody is released
        after, valid = release(state, jnp.array(marked))
        assert not valid
        assert same(state, after)


LENGTHS = (1, 9, 129, 16)  # 16 fills blocks of 1 and of 8


def pairs(block_size: int) -> tables.BlockTable:
    """Rows 2k hold ``LENGTHS[k]`` tokens, rows 2k + 1 are forks of them."""
    state, _ = store(empty(block_size), [n for length in LENGTHS for n in (length, 0)])
    family = [parent for row in range(0, 2 * len(LENGTHS), 2) for parent in (ROWS, row)]
    after, fits = fork(state, rows_of(family, ROWS), rows_of([n for n in LENGTHS for _ in "ab"]))
    assert fits
    assert after.pool.free == state.pool.free
    return after


def marks(rows: range) -> jax.Array:
    return jnp.array([row in rows for row in range(ROWS)])


@pytest.mark.parametrize("block_size", [1, 8])
def test_fork_shares_and_the_last_release_frees(block_size):
    state = pairs(block_size)
    blocks = sum(ceil_div(length, block_size) for length in LENGTHS)
    held = blocks_held(state)
    assert state.pool.refcount_N.tolist() == [2] * blocks + [0] * (BLOCKS - blocks)
    assert held[0:8:2] == held[1:8:2]
    state, _ = release(state, marks(range(0, 8, 2)))
    assert state.pool.used == blocks
    assert state.pool.refcount_N.max() == 1
    assert blocks_held(state)[1:8:2] == held[1:8:2]
    state, _ = release(state, marks(range(1, 8, 2)))
    assert state.pool.free == BLOCKS


@pytest.mark.parametrize("block_size", [1, 8])
@pytest.mark.parametrize("appended", [1, 8, 129])
@pytest.mark.parametrize("writer", [0, 1], ids=["parent writes", "child writes"])
def test_write_after_fork_copies_one_partial_block(block_size, appended, writer):
    before = pairs(block_size)
    state, copies = store(before, [appended * (row % 2 == writer) for row in range(8)])
    taken = 0
    for k, length in enumerate(LENGTHS):
        row, other, last = 2 * k + writer, 2 * k + 1 - writer, ceil_div(length, block_size) - 1
        old, new = blocks_held(before)[row], blocks_held(state)[row]
        partial = length % block_size > 0
        assert blocks_held(state)[other] == old
        assert new[: length // block_size] == old[: length // block_size]
        assert copies.source_C[row] == (old[last] if partial else BLOCKS)
        assert copies.target_C[row] == (new[last] if partial else BLOCKS)
        assert state.pool.refcount_N[old[last]] == (1 if partial else 2)
        assert copies.source_C[other] == BLOCKS
        taken += ceil_div(length + appended, block_size) - length // block_size
    assert before.pool.free - state.pool.free == taken
    _, copies = store(state, [int(row < 8) for row in range(8)])
    assert copies.source_C.tolist() == [BLOCKS] * ROWS  # by now everybody writes alone
    state, _ = release(state, marks(range(8)))
    assert state.pool.free == BLOCKS


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_joint_writers_but_one_copy(first):
    """Families of four rows share a partial block; another subset of each writes."""
    state, _ = store(empty(8), [9, 0, 0, 0] * 4)
    family = [parent for row in range(0, 16, 4) for parent in (ROWS, row, row, row)]
    before, fits = fork(state, rows_of(family, ROWS), rows_of([9] * 16))
    assert fits
    writes = [subset >> bit & 1 for subset in range(first, first + 4) for bit in range(4)]
    state, copies = store(before, writes)
    for row in range(0, 16, 4):
        rows = range(row, row + 4)
        old = blocks_held(before)[row][-1]
        writers = [r for r in rows if writes[r]]
        kept = [r for r in rows if blocks_held(state)[r][-1] == old]
        copied = [r for r in rows if copies.source_C[r] == old]
        assert kept == [r for r in rows if r not in copied]
        assert copied == (writers[:-1] if len(writers) == 4 else writers)
        assert state.pool.refcount_N[old] == len(kept)
    assert before.pool.free - state.pool.free == (copies.source_C != BLOCKS).sum()
