"""The ledger of block tables against a look at every slot of the pool."""

from __future__ import annotations

import random
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from paged_jax.memory import block_table as tables
from paged_jax.memory import ledger as ledgers
from paged_jax.memory import pool as pools
from tests.support.paged_lists import PagedLists, counts

ROWS, BLOCKS, CELLS = 5, 12, 6
STATES = 200


def wander(rng: random.Random, block_size: int) -> PagedLists:
    """Rows after a random life: shared blocks, whole and in part, some of them left by others."""
    lists = PagedLists(rows=ROWS, blocks=BLOCKS, block_size=block_size, blocks_per_row=CELLS)
    for _ in range(rng.randint(0, 12)):
        lengths = lists.lengths()
        live = [row for row in range(ROWS) if lengths[row]]
        idle = [row for row in range(ROWS) if not lengths[row]]
        verb = rng.choice(["reserve", "fork", "fork", "release"])
        if verb == "reserve":
            lists.reserve([rng.choice([0, 0, 1, 2, 5]) for _ in range(ROWS)])
        elif verb == "fork" and live and idle:
            parent = rng.choice(live)
            fewer = rng.choice([0, 0, 1, 2, 4])
            lists.fork({rng.choice(idle): (parent, max(1, lengths[parent] - fewer))})
        elif verb == "release" and len(live) > 1:
            lists.release({rng.choice(live)})
    return lists


def as_arrays(lists: PagedLists) -> tables.BlockTable:
    held = Counter(block for table in lists.tables for block in table)
    pool = pools.Pool(
        refcount_N=counts([held[block] for block in range(BLOCKS)]),
        queue_N=counts(lists.free + [0] * (BLOCKS - len(lists.free))),
        head=jnp.int32(0),
        free=jnp.int32(len(lists.free)),
        blocks=jnp.int32(BLOCKS),
    )
    table_BM = jnp.stack(
        [counts(table + [BLOCKS] * (CELLS - len(table))) for table in lists.tables]
    )
    return tables.BlockTable(pool, table_BM, counts(lists.lengths()), lists.size)


def look(lists: PagedLists, finals: list[int], pool_slots: int, short: bool) -> dict[str, int]:
    """The category of every slot, by asking all who hold its block."""
    found = Counter(dict.fromkeys(ledgers.CATEGORIES, 0))
    found["round_up"] = pool_slots - BLOCKS * lists.size
    for block in range(BLOCKS):
        holders = [
            (row, table.index(block)) for row, table in enumerate(lists.tables) if block in table
        ]
        for slot in range(lists.size):
            positions = [(row, place * lists.size + slot) for row, place in holders]
            if any(position < len(lists.histories[row]) for row, position in positions):
                found["token"] += 1
            elif any(position < finals[row] for row, position in positions):
                found["reserved"] += 1
            elif holders:
                found["internal"] += 1
            else:
                found["short" if short else "free"] += 1
    return dict(found)


class Cases:
    """Random tables, what their rows will store, and what a look at them finds."""

    def __init__(self, block_size: int, remainder: int) -> None:
        rng = random.Random(block_size)
        self.pool_slots = BLOCKS * block_size + remainder
        self.lists = [wander(rng, block_size) for _ in range(STATES)]
        self.shorts = [rng.random() < 0.5 for _ in range(STATES)]
        self.finals = [
            [length + rng.randint(0, 7) for length in lists.lengths()] for lists in self.lists
        ]
        self.expected = [
            look(lists, finals, self.pool_slots, short)
            for lists, finals, short in zip(self.lists, self.finals, self.shorts, strict=True)
        ]

    def ledgers(self, change=lambda state: state, later: int = 0) -> list[dict[str, int]]:
        """Computed in a loop, so that the branch without shared blocks is taken, too."""
        states = [change(as_arrays(lists)) for lists in self.lists]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        finals = jnp.array(self.finals, jnp.int32) + later

        def account(case: tuple) -> ledgers.Ledger:
            state, final_B, short = case
            return tables.ledger(state, final_B, pool_slots=self.pool_slots, short=short)

        ledger = jax.jit(lambda *cases: jax.lax.map(account, cases))(
            stacked, finals, jnp.array(self.shorts)
        )
        columns = [getattr(ledger, category).tolist() for category in ledgers.CATEGORIES]
        return [
            dict(zip(ledgers.CATEGORIES, row, strict=True)) for row in zip(*columns, strict=True)
        ]


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases(block_size=4, remainder=0)


@pytest.mark.parametrize(("block_size", "remainder"), [(1, 0), (3, 2), (4, 3), (7, 0)])
def test_every_slot_is_where_a_look_finds_it(block_size, remainder):
    some = Cases(block_size, remainder)
    computed = some.ledgers()
    assert computed == some.expected
    for ledger in computed:
        assert sum(ledger.values()) == BLOCKS * block_size + remainder
        assert ledger["stranded"] == ledger["cached"] == 0
        assert ledger["round_up"] == remainder


def test_cases_are_worth_a_look(cases):
    assert cases.ledgers() == cases.expected
    shared = sum(
        any(table and lists.holders(table[-1]) > 1 for table in lists.tables)
        for lists in cases.lists
    )
    assert 50 < shared < STATES - 50
    for category in ("token", "reserved", "internal", "short", "free"):
        assert sum(ledger[category] > 0 for ledger in cases.expected) > 40


def alone(state: tables.BlockTable) -> tables.BlockTable:
    """Nobody seems to share."""
    held_N = jnp.minimum(state.pool.refcount_N, 1)
    return state.replace(pool=state.pool.replace(refcount_N=held_N))


def longer(state: tables.BlockTable) -> tables.BlockTable:
    return state.replace(length_B=state.length_B + (state.length_B % 4 > 0))


def test_mutants_disagree(cases):
    assert cases.ledgers(alone) != cases.expected
    assert cases.ledgers(longer) != cases.expected
    assert cases.ledgers(later=1) != cases.expected


def test_an_end_that_has_passed_reserves_nothing(cases):
    for ledger, expected in zip(cases.ledgers(later=-99), cases.expected, strict=True):
        assert ledger["reserved"] == 0
        assert ledger["internal"] == expected["reserved"] + expected["internal"]
        assert ledger["token"] == expected["token"]


def test_categories_are_the_fields():
    assert tuple(ledgers.Ledger.__dataclass_fields__) == ledgers.CATEGORIES


def test_a_shared_partial_block_is_its_longest_holders():
    """Row 0 holds 6 of 8 slots and is done; row 1 shares 5 of them, and will store 7 in the end."""
    final_B = counts([6, 7, 0, 0, 0])
    account = jax.jit(lambda state: tables.ledger(state, final_B, pool_slots=BLOCKS * 4))
    lists = PagedLists(rows=ROWS, blocks=BLOCKS, block_size=4, blocks_per_row=CELLS)
    lists.reserve([6, 0, 0, 0, 0])
    lists.fork({1: (0, 5)})
    both = account(as_arrays(lists))
    assert (both.token, both.reserved, both.internal) == (6, 1, 1)
    lists.release({0})
    one = account(as_arrays(lists))
    assert (one.token, one.reserved, one.internal) == (5, 2, 1)
