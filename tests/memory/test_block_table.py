"""Block tables against Python lists: every verb, in any order, block for block and by content."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from paged_jax.memory import block_table as tables
from paged_jax.memory import pool as pools
from tests.support.paged_lists import Contents, PagedLists, counts, same

ROWS, BLOCKS, CELLS = 5, 12, 6


class Verbs:
    """Compiled anew, so that a mutant of the module is seen."""

    def __init__(self) -> None:
        self.reserve = jax.jit(functools.partial(tables.reserve))
        self.decode = jax.jit(functools.partial(tables.reserve, most_tokens=1))
        self.fork = jax.jit(functools.partial(tables.fork))
        self.release = jax.jit(functools.partial(tables.release))
        self.freed_by = jax.jit(functools.partial(tables.freed_by))


@pytest.fixture(scope="module")
def verbs() -> Verbs:
    return Verbs()


def empty(block_size: int = 3) -> tables.BlockTable:
    return tables.create(rows=ROWS, blocks=BLOCKS, block_size=block_size, blocks_per_row=CELLS)


def marks(rows: set[int]) -> jax.Array:
    return jnp.array([row in rows for row in range(ROWS)])


class Machine(stateful.RuleBasedStateMachine):
    """Any sequence of verbs, and what the rows of a cache hold after it."""

    verbs: Verbs
    block_size: int

    def __init__(self) -> None:
        super().__init__()
        self.state = empty(self.block_size)
        self.model = PagedLists(
            rows=ROWS, blocks=BLOCKS, block_size=self.block_size, blocks_per_row=CELLS
        )
        self.contents = Contents(BLOCKS, self.block_size)

    def write(self, tokens: list[int], result: tuple) -> None:
        """Holds the result of a reservation to the model, then writes the tokens."""
        state, copies, fits = result
        stored = self.model.lengths()
        expected = self.model.reserve(tokens)
        assert bool(fits) == (expected is not None)
        made = [(expected or {}).get(row, (BLOCKS, BLOCKS)) for row in range(ROWS)]
        ends = copies.source_C.tolist(), copies.target_C.tolist()
        assert list(zip(*ends, strict=True)) == made
        assert fits or same(self.state, state)
        self.state = state
        self.contents.write(state, copies, stored, self.model.histories)

    def share(self, family: dict[int, tuple[int, int]]) -> None:
        """Forks, child -> (parent, tokens)."""
        calls = [family.get(row, (ROWS, 0)) for row in range(ROWS)]
        parents, tokens = map(list, zip(*calls, strict=True))
        state, fits = self.verbs.fork(self.state, counts(parents), counts(tokens))
        assert bool(fits) == self.model.fork(family)
        assert fits or same(self.state, state)
        self.state = state

    def leave(self, rows: set[int]) -> None:
        """Releases, and holds what it frees to what it would have freed."""
        free = self.state.pool.free
        freed = self.verbs.freed_by(self.state, marks(rows))
        assert freed == self.model.freed_by(rows)
        state, valid = self.verbs.release(self.state, marks(rows))
        assert bool(valid) == self.model.release(rows)
        assert state.pool.free == free + freed if valid else same(self.state, state)
        self.state = state

    def rows(self, live: bool) -> list[int]:
        return [row for row, length in enumerate(self.model.lengths()) if (length > 0) == live]

    @stateful.rule(
        tokens=st.lists(st.sampled_from([0, 0, 0, 1, 2, 4, 7]), min_size=ROWS, max_size=ROWS)
    )
    def reserve(self, tokens: list[int]) -> None:
        self.write(tokens, self.verbs.reserve(self.state, counts(tokens)))

    @stateful.rule(rows=st.sets(st.integers(0, ROWS - 1), min_size=1))
    def decode(self, rows: set[int]) -> None:
        tokens = [int(row in rows) for row in range(ROWS)]
        result = self.verbs.decode(self.state, counts(tokens))
        assert same(result, self.verbs.reserve(self.state, counts(tokens)))
        self.write(tokens, result)

    @stateful.precondition(lambda self: self.rows(live=True) and self.rows(live=False))
    @stateful.rule(data=st.data(), fewer=st.sampled_from([0, 0, 1, 2, 4]))
    def fork(self, data: st.DataObject, fewer: int) -> None:
        parent = data.draw(st.sampled_from(self.rows(live=True)))
        children = st.sampled_from(self.rows(live=False))
        tokens = max(1, self.model.lengths()[parent] - fewer)
        others = {child: (parent, tokens) for child in data.draw(st.sets(children, max_size=2))}
        self.share(others | {data.draw(children): (parent, self.model.lengths()[parent])})

    @stateful.precondition(lambda self: self.rows(live=True))
    @stateful.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        live = st.sampled_from(self.rows(live=True))
        self.leave(data.draw(st.sets(live, min_size=1, max_size=2)))

    @stateful.rule(
        row=st.integers(0, ROWS - 1),
        parent=st.integers(0, ROWS - 1),
        tokens=st.sampled_from([-1, 0, 2, 19, 2**31 - 1]),
    )
    def misuse(self, row: int, parent: int, tokens: int) -> None:
        """Mostly refused: no such count of tokens, a child with blocks, a row that is empty."""
        self.share({row: (parent, tokens)})
        self.leave({row, parent})
        self.reserve([tokens * (other == row) for other in range(ROWS)])

    @stateful.invariant()
    def agrees(self) -> None:
        pool = jax.tree.map(np.asarray, self.state.pool)
        held = Counter(block for table in self.model.tables for block in table)
        queue = [int(pool.queue_N[(pool.head + rank) % BLOCKS]) for rank in range(pool.free)]
        assert tables.faults(self.state) == []
        assert sorted([*queue, *held]) == list(range(BLOCKS))
        assert pool.refcount_N.tolist() == [held[block] for block in range(BLOCKS)]
        assert queue == self.model.free
        assert self.state.length_B.tolist() == self.model.lengths()
        for table_M, table in zip(self.state.table_BM.tolist(), self.model.tables, strict=True):
            assert table_M == table + [BLOCKS] * (CELLS - len(table))
        self.contents.poison(self.state)
        assert self.contents.read(self.state) == self.model.histories

    def teardown(self) -> None:
        state, valid = self.verbs.release(self.state, self.state.length_B > 0)
        assert valid
        assert state.pool.free == BLOCKS
        assert tables.faults(state) == []


def run_machine(verbs: Verbs, block_size: int, **settings: Any) -> None:
    machine = type("Machine", (Machine,), {"verbs": verbs, "block_size": block_size})
    usual = hypothesis.settings(
        max_examples=80, stateful_step_count=20, deadline=None, derandomize=True, database=None
    )
    stateful.run_state_machine_as_test(machine, settings=hypothesis.settings(usual, **settings))


@pytest.mark.parametrize("block_size", [3, 1])
def test_verbs_agree_with_lists(verbs, block_size):
    run_machine(verbs, block_size)


def keeping(elect: Callable) -> Callable:
    """``pool.drop`` with another election of the cells that a block's last holders kept."""
    drop = pools.drop
    return lambda pool, block_Z: (drop(pool, block_Z)[0], elect(drop, pool, block_Z))


def all_holders(drop: Callable, pool: pools.Pool, block_Z: jax.Array) -> jax.Array:
    left_Z = drop(pool, block_Z)[0].refcount_N.at[block_Z].get(mode="fill", fill_value=1)
    return left_Z == 0


MUTANTS = {
    "holds nothing": (pools, "hold", lambda pool, block_Z: pool),
    "nobody keeps": (
        pools,
        "drop",
        keeping(lambda drop, pool, block_Z: jnp.zeros_like(block_Z, bool)),
    ),
    "everybody keeps": (pools, "drop", keeping(all_holders)),
    "the first keeps": (
        pools,
        "drop",
        keeping(lambda drop, pool, block_Z: drop(pool, block_Z[::-1])[1][::-1]),
    ),
    "takes without a ring": (pools, "_place", lambda pool, rank: pool.head + rank),
    "frees the head first": (
        pools,
        "give",
        lambda pool, block_Z, freed_Z, give=pools.give: give(pool, block_Z[::-1], freed_Z[::-1]),
    ),
    "never copies": (
        tables,
        "last_block",
        lambda state, rows_B: jnp.full_like(state.length_B, state.pool.none),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_disagree_with_lists(monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    settings = {"phases": [hypothesis.Phase.generate], "report_multiple_bugs": False}
    with pytest.raises(AssertionError):
        run_machine(Verbs(), 3, **settings)


def test_a_skipped_copy_is_read_back(verbs):
    state, _, _ = verbs.reserve(empty(), counts([4, 0, 0, 0, 0]))
    state, _ = verbs.fork(state, counts([ROWS, 0, ROWS, ROWS, ROWS]), counts([0, 4, 0, 0, 0]))
    after, copies, _ = verbs.reserve(state, counts([1, 1, 0, 0, 0]))
    nothing = jax.tree.map(lambda block_C: jnp.full_like(block_C, BLOCKS), copies)
    histories = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [], [], []]
    for made, intact in ((copies, True), (nothing, False)):
        contents = Contents(BLOCKS, 3)
        contents.write(state, nothing, [0] * ROWS, [history[:4] for history in histories])
        contents.write(after, made, [4, 4, 0, 0, 0], histories)
        assert (contents.read(after) == histories) is intact


def family(verbs: Verbs) -> tables.BlockTable:
    """Row 0 holds 18 tokens, all of its cells; rows 1 and 3 share the first 4 and 9 of them."""
    state, _, fits = verbs.reserve(empty(), counts([18, 0, 0, 0, 0]))
    state, shared = verbs.fork(state, counts([ROWS, 0, ROWS, 0, ROWS]), counts([0, 4, 0, 9, 0]))
    assert fits & shared
    return state


def with_pool(change: Callable[[pools.Pool], pools.Pool]) -> Callable:
    return lambda state: state.replace(pool=change(state.pool))


BREAKS = {
    "a reference more": with_pool(lambda p: p.replace(refcount_N=p.refcount_N.at[2].add(1))),
    "a reference less": with_pool(lambda p: p.replace(refcount_N=p.refcount_N.at[2].add(-1))),
    "free and referenced": with_pool(lambda p: p.replace(head=p.head - 1, free=p.free + 1)),
    "free twice": with_pool(lambda p: p.replace(queue_N=p.queue_N.at[7].set(8))),
    "leaked": with_pool(lambda p: p.replace(free=p.free - 1)),
    "no block in the queue": with_pool(lambda p: p.replace(queue_N=p.queue_N.at[7].set(BLOCKS))),
    "below the blocks in the queue": with_pool(
        lambda p: p.replace(queue_N=p.queue_N.at[7].set(-1))
    ),
    "a cell too many": lambda state: state.replace(table_BM=state.table_BM.at[1, 2].set(2)),
    "a cell too few": lambda state: state.replace(table_BM=state.table_BM.at[1, 1].set(BLOCKS)),
    "another block": lambda state: state.replace(table_BM=state.table_BM.at[1, 1].set(3)),
    "a cell past the pool": lambda state: state.replace(table_BM=state.table_BM.at[1, 1].set(99)),
    "a cell below the pool": lambda state: state.replace(table_BM=state.table_BM.at[1, 1].set(-1)),
    "lost": lambda state: state.replace(length_B=state.length_B.at[3].set(0)),
    "longer than its row": lambda state: state.replace(length_B=state.length_B.at[0].add(1)),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_faults_are_found(verbs, broken):
    state = family(verbs)
    assert tables.faults(state) == []
    assert tables.faults(BREAKS[broken](state)) != []


@pytest.mark.parametrize("parent", [-1, ROWS + 1, 99, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("holder", [0, ROWS - 1])
def test_fork_refuses_a_parent_that_is_no_row(verbs, parent, holder):
    tokens = [2 * (row == holder) for row in range(ROWS)]
    state, _, _ = verbs.reserve(empty(), counts(tokens))
    after, fits = verbs.fork(
        state, counts([ROWS, ROWS, parent, ROWS, ROWS]), counts([0, 0, 1, 0, 0])
    )
    assert not fits
    assert same(state, after)


def test_fork_shares_everything_by_default(verbs):
    state = family(verbs)
    parents = counts([ROWS, ROWS, 3, ROWS, 0])
    everything = verbs.fork(state, parents, counts([0, 0, 9, 0, 18]))
    assert same(jax.jit(tables.fork)(state, parents), everything)


def test_a_bound_on_the_tokens_is_held(verbs):
    state = family(verbs)
    after, _, fits = verbs.decode(state, counts([0, 1, 2, 0, 0]))
    assert not fits
    assert same(state, after)


@pytest.mark.parametrize("name", ["rows", "blocks", "block_size", "blocks_per_row"])
def test_create_refuses(name):
    sizes = {"rows": 2, "blocks": 3, "block_size": 4, "blocks_per_row": 5}
    with pytest.raises(ValueError, match=f"{name}: expected .*at least 1, got 0"):
        tables.create(**sizes | {name: 0})


def test_wrong_shapes_are_refused():
    for verb in (tables.reserve, tables.release, tables.fork):
        with pytest.raises(ValueError, match="axis B has size"):
            verb(empty(), jnp.zeros(ROWS + 1, jnp.int32))
