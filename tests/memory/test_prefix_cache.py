"""The prefix cache against plain Python: every verb, in any order, block for block."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from paged_jax.memory import idle_list, prefix_cache, prefix_index, prefix_keys
from paged_jax.memory import linked_list as lists
from tests.support.paged_lists import counts, same
from tests.support.prefix_lists import (
    CELLS,
    MOST,
    NONE,
    ROWS,
    SIZE,
    PrefixLists,
    Verbs,
    compiled_verbs,
    empty,
    padded,
)

BLOCKS = 7  # of the pool, which the arrays could hold more of: three long prompts do not fit


@pytest.fixture(scope="module")
def verbs() -> Verbs:
    return compiled_verbs()


class Pair:
    """The cache and its model. Every verb acts on both and compares all there is."""

    def __init__(self, verbs: Verbs) -> None:
        self.verbs = verbs
        self.table, self.cache = empty(BLOCKS)
        self.model = PrefixLists(rows=ROWS, blocks=BLOCKS, block_size=SIZE, blocks_per_row=CELLS)
        self.salts = [0] * ROWS
        self.named = [0] * ROWS  # blocks of each row that were registered

    def admit(self, row: int, tokens: list[int], salt: int, registers: bool = True) -> None:
        found = self.model.match(tokens, salt)
        block_M, hits = self.verbs.match(self.cache, padded(tokens), len(tokens), salt)
        assert block_M.tolist() == found + [NONE] * (len(block_M) - len(found))
        assert hits == len(found)
        before = self.table, self.cache
        self.table, self.cache, hits, fits = self.verbs.admit(
            self.table, self.cache, row, padded(tokens), len(tokens), salt
        )
        expected = self.model.admit(row, tokens, salt)
        assert (hits if fits else None) == expected
        if expected is None:
            assert same(before, (self.table, self.cache))
        else:
            self.salts[row], self.named[row] = salt, expected
            if registers:
                self.register(row, len(tokens) // SIZE)
        self.agrees()

    def register(self, row: int, end: int) -> None:
        self.cache, valid = self.verbs.register(
            self.table,
            self.cache,
            row,
            padded(self.model.histories[row]),
            self.named[row],
            end,
            self.salts[row],
        )
        assert valid
        self.model.register(row, end, self.salts[row])
        self.named[row] = end

    def write(self, new: list[list[int]], registers: bool = True) -> None:
        before = self.table, self.cache
        tokens_B = counts(list(map(len, new)))
        self.table, self.cache, _, fits = self.verbs.reserve(self.table, self.cache, tokens_B)
        assert bool(fits) == self.model.reserve(new)
        if not fits:
            assert same(before, (self.table, self.cache))
        elif registers:
            for row, history in enumerate(self.model.histories):
                self.register(row, len(history) // SIZE)
        self.agrees()

    def fork(self, child: int, parent: int, tokens: int) -> None:
        parents = [parent if row == child else ROWS for row in range(ROWS)]
        self.table, fits = self.verbs.fork(self.table, counts(parents), counts([tokens] * ROWS))
        assert fits
        self.model.fork(child, parent, tokens)
        self.salts[child] = self.salts[parent]
        self.named[child] = min(self.named[parent], tokens // SIZE)
        self.agrees()

    def release(self, rows: set[int]) -> None:
        before = self.table, self.cache
        marked_B = jnp.array([row in rows for row in range(ROWS)])
        self.table, self.cache, valid = self.verbs.release(self.table, self.cache, marked_B)
        assert bool(valid) == self.model.release(rows)
        assert valid or same(before, (self.table, self.cache))
        self.named = [self.named[row] * bool(self.model.tables[row]) for row in range(ROWS)]
        self.agrees()

    def reset(self) -> None:
        before = self.table, self.cache
        self.table, self.cache, done = self.verbs.reset(self.table, self.cache)
        assert bool(done) == self.model.reset()
        assert done or same(before, (self.table, self.cache))
        self.agrees()

    def agrees(self) -> None:
        pool, index = jax.tree.map(np.asarray, (self.table.pool, self.cache.index))
        assert prefix_cache.faults(self.table, self.cache) == []
        assert self.table.length_B.tolist() == list(map(len, self.model.histories))
        for table_M, table in zip(self.table.table_BM.tolist(), self.model.tables, strict=True):
            assert table_M == table + [NONE] * (CELLS - len(table))
        assert pool.refcount_N.tolist() == [self.model.holders(n) for n in range(NONE)]
        queue = [int(pool.queue_N[(pool.head + rank) % BLOCKS]) for rank in range(pool.free)]
        assert queue == self.model.free
        assert lists.order(self.cache.order.links, NONE) == self.model.idle
        assert set(np.flatnonzero(index.keyed_N)) == set(self.model.keyed)
        for block, (salt, tokens) in self.model.keyed.items():
            assert (index.salt_N[block], *index.token_NS[block]) == (salt, *tokens[-SIZE:])


ROW, SALT = st.integers(0, ROWS - 1), st.sampled_from([0, 0, 0, 1])
# Zeros, then ones: most prompts begin as another did, and part from it at any place.
PROMPT = st.tuples(st.integers(0, 8), st.integers(0, 2)).map(
    lambda lengths: ([0] * lengths[0] + [1] * lengths[1]) or [0]
)


class Machine(stateful.RuleBasedStateMachine):
    """Requests of two tenants in a pool that is too small for three long ones."""

    verbs: Verbs

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(self.verbs)

    def rows(self, live: bool) -> list[int]:
        return [row for row in range(ROWS) if bool(self.pair.model.tables[row]) == live]

    @stateful.precondition(lambda self: self.rows(live=False))
    @stateful.rule(tokens=PROMPT, salt=SALT, registers=st.sampled_from([True, True, False]))
    def admit(self, tokens: list[int], salt: int, registers: bool) -> None:
        self.pair.admit(self.rows(live=False)[0], tokens, salt, registers)

    @stateful.precondition(lambda self: self.rows(live=True))
    @stateful.rule(rows=st.sets(ROW), tokens=st.sampled_from([[0], [1], [0, 0, 0]]))
    def write(self, rows: set[int], tokens: list[int]) -> None:
        writers = rows & set(self.rows(live=True))
        self.pair.write([tokens if row in writers else [] for row in range(ROWS)])

    @stateful.precondition(lambda self: self.rows(live=True) and self.rows(live=False))
    @stateful.rule(data=st.data(), fewer=st.sampled_from([0, 1, 1, 2]), orphan=st.booleans())
    def fork(self, data: st.DataObject, fewer: int, orphan: bool) -> None:
        """An orphan is alone with its parent's last block, which may be full, and writes there."""
        parent, child = data.draw(st.sampled_from(self.rows(live=True))), self.rows(live=False)[0]
        tokens = max(len(self.pair.model.histories[parent]) - fewer, 1)
        self.pair.fork(child, parent, tokens)
        if orphan:
            self.pair.release({parent})
            self.pair.write([[1] * (row == child) for row in range(ROWS)])

    @stateful.precondition(lambda self: self.rows(live=True))
    @stateful.rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pair.release(data.draw(st.sets(st.sampled_from(self.rows(live=True)), min_size=1)))

    @stateful.rule(row=ROW, rows=st.sets(ROW, min_size=1), tokens=PROMPT)
    def misuse(self, row: int, rows: set[int], tokens: list[int]) -> None:
        """Mostly refused: a row that holds tokens or is too short or holds none, blocks in use."""
        self.pair.admit(row, tokens, 0)
        self.pair.admit(row, [0] * MOST, 0)
        self.pair.release(rows)
        self.pair.reset()


def test_verbs_agree_with_plain_python(verbs):
    machine = type("Machine", (Machine,), {"verbs": verbs})
    settings = hypothesis.settings(
        max_examples=50, stateful_step_count=20, deadline=None, derandomize=True, database=None
    )
    stateful.run_state_machine_as_test(machine, settings=settings)


def walk(pair: Pair, seed: int, operations: int) -> None:
    """Random verbs, of which a few always meet in a short time."""
    rng = random.Random(seed)
    for _ in range(operations):
        live = [row for row in range(ROWS) if pair.model.tables[row]]
        vacant = [row for row in range(ROWS) if row not in live]
        verb = rng.choice(["admit", "admit", "write", "release", "fork", "reset"])
        if verb == "admit" and vacant:
            tokens = [0] * rng.randint(1, 8) + [1] * rng.choice([0, 0, 1, 2])
            pair.admit(vacant[0], tokens, rng.choice([0, 0, 0, 1]), rng.random() < 0.9)
        elif verb == "write" and live:
            writer = rng.choice(live)
            pair.write([[rng.randint(0, 1)] * (row == writer) for row in range(ROWS)])
        elif verb == "fork" and live and vacant:
            parent = rng.choice(live)
            pair.fork(vacant[0], parent, rng.randint(1, len(pair.model.histories[parent])))
        elif verb == "release" and live:
            pair.release(set(rng.sample(live, rng.randint(1, len(live)))))
        elif verb == "reset" and not live and rng.random() < 0.2:
            pair.reset()


@pytest.mark.parametrize("seed", range(3))
def test_long_walks_agree_with_plain_python(verbs, seed):
    walk(Pair(verbs), seed, 300)


def without(argument: int, function: Callable, value: Any) -> Callable:
    """The function with one argument replaced."""

    def mutant(*arguments: Any) -> Any:
        return function(*arguments[:argument], value, *arguments[argument + 1 :])

    return mutant


def unverified(*names: str) -> Callable:
    """An entry's comparison that leaves out some of the key, the salt and the tokens."""

    def equals(index: prefix_index.Index, block: Any, key_A: Any, salt: Any, token_S: Any) -> Any:
        same_as = {
            "key": (index.key_NA[block] == key_A).all(),
            "salt": index.salt_N[block] == salt,
            "tokens": (index.token_NS[block] == token_S).all(),
        }
        return jnp.array([same for name, same in same_as.items() if name not in names]).all()

    return equals


def newest_first(idle: idle_list.IdleList) -> tuple[idle_list.IdleList, jax.Array]:
    block = idle.links.previous_Z[idle.links.previous_Z.shape[0] - 1]
    return idle_list.leave(idle, block), block


MUTANTS: dict[str, list[tuple[ModuleType, str, Callable]]] = {
    "keys without the chain": [
        (prefix_keys, "extend", without(0, prefix_keys.extend, prefix_keys.root(0)))
    ],
    "tenants are not told apart": [
        (prefix_keys, "root", without(0, prefix_keys.root, 0)),
        (prefix_index, "_equals", unverified("salt")),
    ],
    "no token is left to compute": [
        (prefix_cache, "_most_hits", lambda count, size: count // size)
    ],
    "the head is evicted before the tail": [
        (
            idle_list,
            "join",
            lambda idle, block_Z, joins_Z, join=idle_list.join: join(
                idle, block_Z[::-1], joins_Z[::-1]
            ),
        )
    ],
    "the newest is evicted first": [(idle_list, "leave_first", newest_first)],
    "what is evicted stays keyed": [(prefix_index, "remove", lambda index, block: index)],
    "a hit stays idle": [(idle_list, "leave", lambda idle, block: idle)],
    "of two equal blocks the second is found": [
        (
            lists,
            "append",
            lambda links, head, node, append=lists.append: append(links, links.next_Z[head], node),
        )
    ],
    "what is overwritten stays keyed": [(prefix_cache, "_forget", lambda index, block_B: index)],
    "idle hits cost nothing": [
        (
            prefix_cache,
            "need",
            lambda table, block_M, hits, tokens: -(-tokens // table.block_size) - hits,
        )
    ],
}


def story(pair: Pair) -> None:
    """Few steps that each need a rule."""
    pair.admit(0, [0, 0, 0, 0, 0, 0], 0)
    pair.admit(1, [0, 0, 0, 0, 0, 0], 0)  # two hits, and the last block twice
    pair.admit(2, [0, 0, 1], 1)  # another tenant: none
    pair.release({0, 1})
    pair.admit(0, [0, 0, 0, 0, 0, 0, 1], 0)  # three hits, all idle
    pair.release({0, 2})
    pair.admit(0, [1, 1, 0, 0, 0], 0)  # a block that stands elsewhere in another chain
    pair.admit(1, [0, 0, 0, 0, 0, 0, 1, 1], 0)  # fits with its idle hits
    pair.admit(2, [0, 0, 1], 1)
    pair.release({0, 1})
    pair.reset()  # refused: row 2 is there
    pair.release({2})
    pair.admit(0, [0] * 8, 0)
    pair.fork(1, 0, 3)
    pair.release({0})
    pair.write([[], [1], []])  # into a full block that nobody else holds now
    pair.release({1})
    pair.admit(0, [0] * 8, 0)
    pair.release({0})
    pair.admit(1, [1] * 7, 0)
    pair.admit(0, [0] * 8, 0)  # three idle hits and nothing else: refused


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_mutants_disagree_with_plain_python(monkeypatch, mutant):
    for replacement in MUTANTS.get(mutant, []):
        monkeypatch.setattr(*replacement)
    with jax.disable_jit():
        if mutant is None:
            story(Pair(Verbs()))
        else:
            with pytest.raises(AssertionError):
                story(Pair(Verbs()))


@pytest.mark.parametrize(
    ("compares_tokens", "found"), [(True, []), (False, [0])], ids=["as it is", "mutant"]
)
def test_equal_keys_of_other_tokens_are_no_hit(monkeypatch, compares_tokens, found):
    """A collision by force: keys that leave the tokens out."""
    no_token = without(1, prefix_keys.extend, jnp.zeros(SIZE, jnp.int32))
    monkeypatch.setattr(prefix_keys, "extend", no_token)
    if not compares_tokens:
        monkeypatch.setattr(prefix_index, "_equals", unverified("tokens"))
    table, cache = empty(BLOCKS)
    with jax.disable_jit():
        table, cache, _, _ = prefix_cache.admit(table, cache, 0, padded([1, 2, 3]), 3, 0)
        cache, _ = prefix_cache.register(table, cache, 0, padded([1, 2, 3]), 0, 1, 0)
        for tokens, blocks in (([1, 2, 4], [0]), ([1, 3, 3], found)):
            block_M, hits = prefix_cache.match(cache, padded(tokens), 3, 0)
            assert block_M[:hits].tolist() == blocks
