"""The pool against a deque and a counter, and the order of its free queue."""

from __future__ import annotations

import functools
import random
from collections import Counter, deque
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import pool as pools
from tests.support.paged_lists import counts, same

BOUND = 16  # length of the arrays, and cells of a call


class Verbs:
    """Compiled anew, so that a mutant of the module is seen."""

    def __init__(self) -> None:
        self.take = jax.jit(functools.partial(pools.take))
        self.hold = jax.jit(functools.partial(pools.hold))
        self.drop = jax.jit(functools.partial(pools.drop))
        self.give = jax.jit(functools.partial(pools.give))
        self.take_one = jax.jit(functools.partial(pools.take_one))
        self.drop_one = jax.jit(functools.partial(pools.drop_one))


@pytest.fixture(scope="module")
def verbs() -> Verbs:
    return Verbs()


def cells(values: list[int], fill: int = BOUND) -> jax.Array:
    return counts(values + [fill] * (BOUND - len(values)))


def wanted(count: int) -> jax.Array:
    return jnp.arange(BOUND) < count


def queue(pool: pools.Pool) -> list[int]:
    """Free blocks, the longest free first."""
    blocks, head = int(pool.blocks), int(pool.head)
    queue_N = np.asarray(pool.queue_N)
    return [int(queue_N[(head + rank) % blocks]) for rank in range(int(pool.free))]


def give_back(verbs: Verbs, pool: pools.Pool, blocks: list[int]) -> pools.Pool:
    pool, last_Z = verbs.drop(pool, cells(blocks))
    assert last_Z.tolist() == wanted(len(blocks)).tolist()
    return verbs.give(pool, cells(blocks), last_Z)


class Model:
    """Blocks in a deque, references in a counter."""

    def __init__(self, blocks: int) -> None:
        self.free = deque(range(blocks))
        self.references: Counter[int] = Counter()

    def take(self) -> int:
        block = self.free.popleft()
        self.references[block] = 1
        return block

    def drop(self, block: int) -> bool:
        """Whether this was the last reference; the block is then free."""
        self.references[block] -= 1
        if not self.references[block]:
            self.free.append(block)
        return not self.references[block]

    def some(self, rng: random.Random) -> list[int]:
        """References that could be dropped, in any order."""
        all_of_them = list(self.references.elements())
        return rng.sample(all_of_them, rng.randint(0, min(len(all_of_them), BOUND // 2)))


def replay(verbs: Verbs, blocks: int, seed: int, operations: int = 120) -> None:
    """Random calls in both forms, over arrays and one by one; both must be as the model."""
    rng, model = random.Random(seed), Model(blocks)
    pool = one_by_one = pools.create(blocks, BOUND)
    for _ in range(operations):
        verb = rng.choice(["take", "take", "hold", "drop", "drop"])
        if verb == "take":
            count = rng.randint(0, min(len(model.free), BOUND // 2))
            where = sorted(rng.sample(range(BOUND), count))
            pool, block_Z = verbs.take(pool, jnp.array([z in where for z in range(BOUND)]))
            expected = [model.take() if z in where else BOUND for z in range(BOUND)]
            assert block_Z.tolist() == expected
            for z in where:
                one_by_one, block = verbs.take_one(one_by_one)
                assert block == expected[z]
        elif verb == "hold":
            held = model.some(rng)
            model.references.update(held)
            pool = verbs.hold(pool, cells(held))
            one_by_one = verbs.hold(one_by_one, cells(held))
        else:
            dropped = model.some(rng)
            lasts = [model.drop(block) for block in dropped]
            pool, last_Z = verbs.drop(pool, cells(dropped))
            assert last_Z.tolist() == lasts + [False] * (BOUND - len(dropped))
            pool = verbs.give(pool, cells(dropped), last_Z)
            for block, last in zip(dropped, lasts, strict=True):
                one_by_one, freed = verbs.drop_one(one_by_one, block)
                assert freed == last
        for form in (pool, one_by_one):
            assert queue(form) == list(model.free)
            assert form.refcount_N.tolist() == [model.references[n] for n in range(BOUND)]
            assert (form.blocks, form.used) == (blocks, blocks - len(model.free))
            in_use = {n for n in range(BOUND) if form.refcount_N[n]}
            assert in_use.isdisjoint(model.free)
            assert in_use.union(model.free) == set(range(blocks))


@pytest.mark.parametrize("blocks", [BOUND, 7, 1])
def test_both_forms_agree_with_model(verbs, blocks):
    replay(verbs, blocks, seed=blocks)


def keeps_count(take: Callable) -> Callable:
    def mutant(pool: pools.Pool, wanted_Z: jax.Array) -> tuple:
        after, block_Z = take(pool, wanted_Z)
        return after.replace(refcount_N=pool.refcount_N), block_Z

    return mutant


def elects(order: Callable) -> Callable:
    def mutant(pool: pools.Pool, block_Z: jax.Array, drop: Callable = pools.drop) -> tuple:
        return drop(pool, block_Z)[0], order(drop(pool, order(block_Z))[1])

    return mutant


MUTANTS = {
    "no ring": ("_place", lambda pool, rank: pool.head + rank),
    "a ring of the arrays' length": ("_place", lambda pool, rank: (pool.head + rank) % BOUND),
    "takes without a reference": ("take", keeps_count(pools.take)),
    "holds nothing": ("hold", lambda pool, block_Z: pool),
    "the lowest cell is elected": ("drop", elects(lambda cell_Z: cell_Z[::-1])),
    "gives in reverse": (
        "give",
        lambda pool, block_Z, freed_Z, give=pools.give: give(pool, block_Z[::-1], freed_Z[::-1]),
    ),
    "always frees": (
        "drop_one",
        lambda pool, block, drop_one=pools.drop_one: (
            drop_one(pool, block)[0].replace(free=pool.free + 1),
            drop_one(pool, block)[1],
        ),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_disagree_with_model(monkeypatch, mutant):
    monkeypatch.setattr(pools, *MUTANTS[mutant])
    with pytest.raises(AssertionError):
        replay(Verbs(), 7, seed=0)


def test_first_in_first_out(verbs):
    pool = pools.create(5, BOUND)
    pool, block = verbs.take_one(pool)
    assert (block, pool.free) == (0, 4)
    pool, block_Z = verbs.take(pool, wanted(2))
    assert block_Z.tolist() == cells([1, 2]).tolist()
    pool = give_back(verbs, pool, [2, 0])
    assert queue(pool) == [3, 4, 2, 0]


@pytest.mark.parametrize("blocks", [1, 2, 16])
def test_an_empty_pool_is_refilled_in_the_order_given(verbs, blocks):
    pool, block_Z = verbs.take(pools.create(blocks, BOUND), wanted(blocks))
    assert block_Z.tolist() == cells(list(range(blocks))).tolist()
    assert (pool.free, pool.used) == (0, blocks)
    order = random.Random(0).sample(range(blocks), blocks)
    pool = give_back(verbs, pool, order)
    pool, block_Z = verbs.take(pool, wanted(blocks))
    assert block_Z.tolist() == cells(order).tolist()


@pytest.mark.parametrize(
    "pieces", [[[1, 3, 5, 4, 0, 2]], [[0], [4, 5], [1, 2, 3]]], ids=["at once", "in three"]
)
@pytest.mark.parametrize("sizes", [[1, 2, 3], [6], [0, 5, 0, 1]])
def test_any_pieces_come_back_in_order(verbs, pieces, sizes):
    pool, _ = verbs.take(pools.create(6, BOUND), wanted(6))
    for piece in pieces:
        pool = give_back(verbs, pool, piece)
    order = [block for piece in pieces for block in piece]
    assert queue(pool) == order
    for size in sizes:
        pool, block_Z = verbs.take(pool, wanted(size))
        assert block_Z.tolist() == cells(order[:size]).tolist()
        order = order[size:]
    assert pool.free == len(order) == 0


def test_nothing_changes_nothing(verbs):
    pool, _ = verbs.take(pools.create(6, BOUND), wanted(4))
    nothing = cells([])
    taken, block_Z = verbs.take(pool, wanted(0))
    dropped, last_Z = verbs.drop(pool, nothing)
    assert not last_Z.any()
    assert block_Z.tolist() == nothing.tolist()
    for after in (taken, dropped, verbs.hold(pool, nothing), verbs.give(pool, nothing, last_Z)):
        assert same(pool, after)


def test_one_block_with_several_references(verbs):
    pool, block = verbs.take_one(pools.create(2, BOUND), 3)
    frees = []
    for _ in range(3):
        pool, freed = verbs.drop_one(pool, block)
        frees.append(bool(freed))
    assert frees == [False, False, True]
    assert queue(pool) == [1, 0]


def test_a_pool_of_traced_size():
    pool = jax.jit(lambda blocks: pools.create(blocks, BOUND))(7)
    assert same(pool, pools.create(7, BOUND))
    assert queue(pool) == list(range(7))
    assert (pool.none, pool.used) == (BOUND, 0)


@pytest.mark.parametrize("blocks", [0, -1, 2.5, np.int32(3)])
def test_create_refuses(blocks):
    with pytest.raises(ValueError, match="blocks: expected an integer of at least 1, got"):
        pools.create(blocks)


@pytest.mark.parametrize("blocks", [BOUND + 1, -1])
def test_create_refuses_what_the_arrays_do_not_hold(blocks):
    with pytest.raises(ValueError, match=f"blocks: expected .*got {blocks}"):
        pools.create(blocks, BOUND)
