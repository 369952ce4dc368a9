"""What a production block manager does, case by case, in blocks of two tokens; refused calls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paged_jax.memory import block_table, prefix_cache, prefix_index
from paged_jax.memory import linked_list as lists
from tests.support.paged_lists import counts, same
from tests.support.prefix_lists import NONE, ROWS, SIZE, compiled_verbs, empty, padded

COMMON = [1, 2, 3, 4, 5, 6]  # three blocks


class Engine:
    """Requests by row: stored, registered, released."""

    def __init__(self, blocks: int) -> None:
        self.verbs = compiled_verbs()
        self.table, self.cache = empty(blocks)

    @property
    def state(self) -> tuple[block_table.BlockTable, prefix_cache.PrefixCache]:
        return self.table, self.cache

    def admit(self, row: int, tokens: list[int], salt: int = 0) -> list[int] | None:
        """The row's blocks, the full ones registered; None where it does not fit."""
        before = self.state
        self.table, self.cache, _, fits = self.verbs.admit(
            self.table, self.cache, row, padded(tokens), len(tokens), salt
        )
        if not fits:
            assert same(before, self.state)
            return None
        self.cache, valid = self.verbs.register(
            self.table, self.cache, row, padded(tokens), 0, len(tokens) // SIZE, salt
        )
        assert valid
        return self.blocks(row)

    def blocks(self, row: int) -> list[int]:
        return [block for block in self.table.table_BM[row].tolist() if block < NONE]

    def release(self, *rows: int) -> None:
        marked_B = jnp.array([row in rows for row in range(ROWS)])
        self.table, self.cache, valid = self.verbs.release(*self.state, marked_B)
        assert valid
        assert prefix_cache.faults(*self.state) == []

    def match(self, tokens: list[int], salt: int = 0) -> list[int]:
        block_M, hits = self.verbs.match(self.cache, padded(tokens), len(tokens), salt)
        return block_M[:hits].tolist()

    def make_room(self, blocks: int) -> bool:
        self.table, self.cache, fits = self.verbs.make_room(*self.state, blocks)
        return bool(fits)

    @property
    def idle(self) -> list[int]:
        return lists.order(self.cache.order.links, NONE)

    @property
    def room(self) -> int:
        return int(prefix_cache.room(*self.state))

    def references(self, blocks: list[int]) -> list[int]:
        return self.table.pool.refcount_N[jnp.array(blocks)].tolist()

    def keyed(self, blocks: list[int]) -> list[bool]:
        return self.cache.index.keyed_N[jnp.array(blocks)].tolist()


def test_a_prompt_shares_what_another_stored_and_finds_it_after_both_left():
    """D1 to D4: hits of running and of left requests, and the order of eviction."""
    engine = Engine(10)
    assert engine.admit(0, [*COMMON, 7]) == [0, 1, 2, 3]
    assert engine.keyed([0, 1, 2, 3]) == [True, True, True, False]  # C1
    assert engine.admit(1, [*COMMON, 8]) == [0, 1, 2, 4]
    assert engine.references([0, 1, 2, 3, 4]) == [2, 2, 2, 1, 1]
    assert engine.room == 5
    engine.release(0)
    engine.release(1)
    assert (engine.room, engine.idle) == (10, [2, 1, 0])
    assert engine.admit(2, [*COMMON, 9]) == [0, 1, 2, 5]
    assert (engine.room, engine.idle) == (6, [])
    engine.release(2)
    # Blocks that hold nothing worth finding go first, hashed ones from the tail.
    assert engine.admit(0, list(range(20, 40))) == [6, 7, 8, 9, 3, 4, 5, 2, 1, 0]
    assert engine.room == 0


def test_one_token_is_always_left_to_compute():
    """D5, with the end of a block on either side."""
    engine = Engine(10)
    engine.admit(0, COMMON)
    found = [len(engine.match([*COMMON, 7][:tokens])) for tokens in range(1, 8)]
    assert found == [0, 0, 1, 1, 2, 2, 3]


def test_the_first_missing_block_ends_a_hit():
    """D6."""
    engine = Engine(10)
    engine.admit(0, [*COMMON, 7])
    blocks = engine.blocks(0)
    assert engine.match([*COMMON, 8]) == blocks[:3]
    index = prefix_index.remove(engine.cache.index, counts(blocks)[1])
    engine.cache = engine.cache.replace(index=index)
    assert engine.match([*COMMON, 8]) == blocks[:1]


def test_equal_blocks_are_found_until_the_last_is_evicted():
    """D7, D8, D9: an aligned repeat computes its last block again, and both stay."""
    engine = Engine(4)
    assert engine.admit(0, COMMON[:4]) == [0, 1]
    assert engine.admit(1, COMMON[:4]) == [0, 2]
    assert engine.keyed([1, 2]) == [True, True]
    engine.release(0, 1)
    assert engine.idle == [1, 2, 0]
    for free, found in ((1, [0, 1]), (2, [0, 2]), (3, [0]), (4, [])):
        assert engine.make_room(free)
        assert engine.match(COMMON) == found


def test_a_block_taken_for_other_tokens_is_found_no_more():
    """D10, in a pool of one block."""
    engine = Engine(1)
    assert engine.admit(0, [1, 2]) == [0]
    engine.release(0)
    assert engine.match([1, 2, 3]) == [0]
    assert engine.admit(0, [3]) == [0]
    assert engine.keyed([0]) == [False]
    assert engine.match([1, 2, 3]) == []


def test_a_hit_is_safe_from_the_blocks_taken_for_the_same_request():
    """D11: the hit is the block that would be evicted first."""
    engine = Engine(2)
    engine.admit(0, [1, 2])
    engine.admit(1, [3, 4])
    engine.release(0, 1)
    assert engine.idle == [0, 1]
    assert engine.admit(2, [1, 2, 5]) == [0, 1]


def test_reset_waits_until_nobody_holds_a_block():
    """D12."""
    engine = Engine(10)
    engine.admit(0, [*COMMON, 7])
    engine.admit(1, [*COMMON, 8])
    engine.release(0)
    table, cache, done = engine.verbs.reset(*engine.state)
    assert not done
    assert same((table, cache), engine.state)
    engine.release(1)
    engine.table, engine.cache, done = engine.verbs.reset(*engine.state)
    assert done
    assert engine.table.pool.free == 10
    assert not engine.cache.index.keyed_N.any()
    assert engine.match([*COMMON, 7]) == []


def test_eviction_is_tail_first_and_the_least_recently_freed_first():
    """E1 to E3."""
    engine = Engine(10)
    long = list(range(10))
    assert engine.admit(0, [*long, 10]) == [0, 1, 2, 3, 4, 5]
    assert engine.admit(1, [20, 21, 22, 23, 24, 25]) == [6, 7, 8]
    engine.release(0)
    engine.release(1)
    assert engine.idle == [4, 3, 2, 1, 0, 8, 7, 6]
    assert engine.admit(2, [*long[:4], 30]) == [0, 1, 9]  # 9 and 5 hold nothing worth finding
    assert (engine.room, engine.idle) == (7, [4, 3, 2, 8, 7, 6])


def test_a_request_that_does_not_fit_changes_nothing():
    """B9: six blocks found, three of them idle, three more needed and too few free."""
    engine = Engine(10)
    prompt = list(range(18))
    engine.admit(0, prompt[:7])
    engine.admit(1, prompt[:13])
    engine.release(1)
    engine.admit(2, [90, 91, 92])
    found = engine.match(prompt)
    assert engine.references(found) == [1, 1, 1, 0, 0, 0]
    assert engine.room == 4
    assert engine.admit(1, prompt) is None
    assert engine.references(found) == [1, 1, 1, 0, 0, 0]
    assert engine.idle == found[:2:-1]
    assert engine.admit(1, prompt[:13]) == [*found, 7]  # three idle ones and a new one


def test_an_idle_hit_is_counted_and_not_taken_twice():
    """B10."""
    engine = Engine(10)
    engine.admit(0, [1, 2, 3])
    engine.release(0)
    block_M, hits = engine.verbs.match(engine.cache, padded([1, 2, 9]), 3, 0)
    assert prefix_cache.need(engine.table, block_M, hits, 3) == 2
    free = int(engine.table.pool.free)
    assert engine.admit(0, [1, 2, 9]) is not None
    assert len(engine.blocks(0)) == 2
    assert engine.table.pool.free == free - 1


def test_without_registering_nothing_is_found():
    """B11: caching off is a cache that is told nothing."""
    verbs, (table, cache) = compiled_verbs(), empty(4)
    table, cache, hits, _ = verbs.admit(table, cache, 0, padded(COMMON), 5, 0)
    table, cache, _ = verbs.release(table, cache, jnp.arange(ROWS) == 0)
    assert (hits, cache.idle, table.pool.free) == (0, 0, 4)
    table, cache, hits, fits = verbs.admit(table, cache, 1, padded([*COMMON, 7, 8]), 8, 0)
    assert (hits, bool(fits)) == (0, True)
    *_, fits = verbs.admit(table, cache, 2, padded([9, 9]), 2, 0)
    assert not fits


def test_another_tenant_finds_nothing():
    """C6."""
    engine = Engine(10)
    engine.admit(0, [*COMMON, 7], salt=1)
    assert len(engine.match([*COMMON, 8], salt=1)) == 3
    assert engine.match([*COMMON, 8], salt=0) == []


def test_registering_bit_by_bit_is_registering_at_once():
    """C3, and what is registered again stays as it was."""
    verbs, tokens = compiled_verbs(), padded([*COMMON, 7])
    table, cache, _, _ = verbs.admit(*empty(10), 1, tokens, 7, 5)
    at_once, _ = verbs.register(table, cache, 1, tokens, 0, 3, 5)
    in_bits = cache
    for first, end in ((0, 1), (1, 1), (1, 3), (0, 3)):
        in_bits, valid = verbs.register(table, in_bits, 1, tokens, first, end, 5)
        assert valid
    assert same(at_once, in_bits)
    assert len({tuple(key_A) for key_A in at_once.index.key_NA[:3].tolist()}) == 3


REGISTERS = {
    "no row": (-1, 0, 1, 0),
    "past the rows": (ROWS, 0, 1, 0),
    "an empty row": (1, 0, 1, 0),
    "before the row": (0, -1, 1, 0),
    "backwards": (0, 2, 1, 0),
    "a block that is not full": (0, 0, 4, 0),
    "another tenant's": (0, 1, 2, 1),
    "behind a gap": (0, 2, 3, 0),
}
ADOPTS = {
    "no row": (-1, [0], 1),
    "past the rows": (ROWS, [0], 1),
    "not empty": (0, [0], 1),
    "not keyed": (1, [0, 3], 2),
    "no block": (1, [0], 2),
    "fewer than none": (1, [0], -1),
}


@pytest.mark.parametrize("call", REGISTERS)
def test_register_refuses(call):
    verbs, tokens = compiled_verbs(), padded([*COMMON, 7])
    row, first, end, salt = REGISTERS[call]
    table, cache, _, _ = verbs.admit(*empty(10), 0, tokens, 7, 0)
    cache, _ = verbs.register(table, cache, 0, tokens, 0, 1, 0)
    after, valid = verbs.register(table, cache, row, tokens, first, end, salt)
    assert not valid
    assert same(after, cache)


@pytest.mark.parametrize("call", ADOPTS)
def test_adopt_refuses(call):
    verbs, tokens = compiled_verbs(), padded([*COMMON, 7])
    row, blocks, hits = ADOPTS[call]
    table, cache, _, _ = verbs.admit(*empty(10), 0, tokens, 7, 0)
    cache, _ = verbs.register(table, cache, 0, tokens, 0, 3, 0)
    block_M = counts(blocks + [NONE] * (10 - len(blocks)))
    *after, fits = verbs.adopt(table, cache, row, block_M, hits)
    assert not fits
    assert same(tuple(after), (table, cache))


def test_beams_leave_their_keyed_blocks_idle():
    engine = Engine(10)
    engine.admit(0, COMMON)
    engine.admit(1, [7, 8, 9])
    after, cache = engine.verbs.reorder(engine.table, engine.cache, counts([1, 1, 2]))
    assert lists.order(cache.order.links, NONE) == [2, 1, 0]
    assert prefix_cache.faults(after, cache) == []
    plain = block_table.reorder(engine.table, counts([1, 1, 2]))
    assert same(
        (after.table_BM, after.length_B, after.pool.refcount_N),
        (plain.table_BM, plain.length_B, plain.pool.refcount_N),
    )


def test_the_ledger_counts_idle_blocks_as_cached():
    engine = Engine(10)
    engine.admit(0, [*COMMON, 7])
    engine.admit(1, [9, 9, 9])
    engine.release(0)
    ledger = prefix_cache.ledger(
        engine.table, engine.cache, counts([0, 4, 0]), pool_slots=21, short=False
    )
    split = jax.tree.map(int, ledger)
    assert (split.token, split.reserved, split.internal) == (3, 1, 0)
    assert (split.cached, split.free, split.round_up) == (6, 10, 1)
    assert sum(jax.tree.leaves(split)) == 21


def test_a_prompt_shorter_than_a_block():
    @jax.jit
    def run() -> tuple:
        table, cache = empty(3)
        table, cache, hits, fits = prefix_cache.admit(table, cache, 0, counts([1]), 1, 0)
        _, empty_span = prefix_cache.register(table, cache, 0, counts([1]), 0, 0, 0)
        _, partial = prefix_cache.register(table, cache, 0, counts([1]), 0, 1, 0)
        return hits, fits, empty_span, partial

    assert [int(answer) for answer in run()] == [0, True, True, False]


@pytest.mark.parametrize("name", ["blocks", "block_size"])
def test_create_refuses(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        prefix_cache.create(**{"blocks": 2, "block_size": 2, name: 0})


def test_a_cache_of_another_pool_is_refused():
    table, _ = empty(3)
    other = prefix_cache.create(blocks=NONE, block_size=SIZE + 1)
    with pytest.raises(ValueError, match=r"expected 10 blocks of 2 slots .* got 10 of 3"):
        prefix_cache.make_room(table, other, 1)
