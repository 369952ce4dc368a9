"""Cache groups: which layers share a table, and rows of several groups against plain lists."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import block_table, cache_groups
from paged_jax.memory import rows as memory
from paged_jax.memory.rows import Rows
from tests.support.group_lists import GONE, GroupLists
from tests.support.models import TINY

ROWS, BLOCKS, SIZE, CELLS = 4, 34, 3, 7
WINDOWS = (None, 5, 1)
# The module's own programs: a mutant compiles its ``slide`` anew.
reserve = jax.jit(lambda rows, tokens_B: (*rows.reserve(tokens_B), rows.demand(tokens_B)))
fork = jax.jit(Rows.fork)
release = jax.jit(Rows.release)
reorder = jax.jit(Rows.reorder)
outstanding = jax.jit(Rows.outstanding)
ledger_of = jax.jit(lambda rows, final_B: rows.ledger(final_B, pool_slots=BLOCKS * SIZE))
slide = jax.jit(Rows.slide)


def groups_of(*windows: int | None, **shape: Any) -> cache_groups.CacheGroups:
    config = dataclasses.replace(TINY, layers=len(windows), windows=windows, **shape)
    return cache_groups.by_window(config)


@pytest.mark.parametrize(
    ("layers", "windows", "places"),
    [
        ((None, None, None), (None,), ((0, 0), (0, 1), (0, 2))),
        ((4, 4), (4,), ((0, 0), (0, 1))),
        ((16, None, 16, None), (16, None), ((0, 0), (1, 0), (0, 1), (1, 1))),
        ((8, 8, None), (8, 8, None), ((0, 0), (1, 0), (2, 0))),
        ((8, 8, 4, None, 8, None, 8, 4), (8, 4, None, 8), None),
        ((64, None, 9, 9), (None, 9), ((0, 0), (0, 1), (1, 0), (1, 1))),  # 64: the context
    ],
)
def test_layers_are_cut_into_groups_of_one_size(layers, windows, places) -> None:
    found = groups_of(*layers)
    assert found.windows == windows
    assert places is None or found.places == places
    counts = Counter(group for group, _ in found.places)
    assert set(counts.values()) == {found.layers}
    assert len(set(found.places)) == len(layers)
    for layer, (group, nth) in zip(layers, found.places, strict=True):
        assert found.windows[group] == (None if layer == 64 else layer)
        assert nth < found.layers


def test_a_deep_alternating_model_has_few_groups() -> None:
    """26 layers of which every sixth sees all: pairs of 22 and of 4."""
    layers = tuple(None if layer % 6 == 5 else 512 for layer in range(26))
    found = groups_of(*layers, max_length=32_768)
    assert (found.count, found.layers) == (13, 2)
    assert found.windows.count(None) == 2


def grown(rows: Rows, tokens: list[int]) -> Rows:
    rows, _, fits, _ = reserve(rows, jnp.array(tokens, jnp.int32))
    assert fits
    return rows


def test_blocks_leave_when_all_their_tokens_are_behind() -> None:
    """J1 and J2: blocks of 2, window 4. Cells never move, and null cells are dropped at the end."""
    rows = memory.create(rows=1, blocks=8, block_size=2, blocks_per_row=6, windows=(4,))
    cells, freed = {}, []
    for stored in (4, 5, 6, 7, 11):
        free = int(rows.table.pool.free)
        rows = grown(rows, [stored - int(rows.length_B[0])])
        taken = free - int(rows.table.pool.free)
        rows = slide(rows)
        pool = rows.table.pool
        back = int(pool.free) - (free - taken)
        place = int(pool.head) + int(pool.free) - back
        freed += [int(pool.queue_N[(place + nth) % 8]) for nth in range(back)]
        cells[stored] = rows.table.table_BM[0].tolist()
        assert block_table.faults(rows.table) == []
    none = 8
    assert cells == {
        4: [0, 1, none, none, none, none],
        5: [none, 1, 2, none, none, none],
        6: [none, 1, 2, none, none, none],
        7: [none, none, 2, 3, none, none],
        11: [none, none, none, none, 4, 5],
    }
    assert freed == [0, 1, 3, 2]
    rows = release(rows, jnp.ones(1, bool))
    assert rows.table.table_BM[0].tolist() == [none] * 6
    assert int(rows.table.pool.free) == 8
    assert block_table.faults(rows.table) == []


def test_groups_take_as_many_blocks_from_one_pool() -> None:
    """J6: a full group and two of windows of two blocks; 55 tokens take four blocks in each."""
    rows = memory.create(rows=2, blocks=20, block_size=16, blocks_per_row=4, windows=(None, 32, 32))
    rows = grown(rows, [55, 0])
    found = [table_BM[0].tolist() for table_BM in rows.tables]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    rows = slide(rows)  # position 55 sees 24..55, of block 1 and later
    found = [table_BM[0].tolist() for table_BM in rows.tables]
    assert found == [[0, 1, 2, 3], [20, 5, 6, 7], [20, 9, 10, 11]]
    assert int(rows.table.pool.used) == 10
    assert int(rows.passed or 0) == 2
    assert rows.length_B.tolist() == [55, 0]


def test_a_window_is_charged_what_a_step_sees() -> None:
    """J11, and that no row ever holds more, whatever its steps."""
    assert cache_groups.most_held(1024, 1024, 16) == 129
    assert cache_groups.most_held(1024, 2048, 16) == 193
    for size, window, most in ((1, 1, 1), (2, 4, 3), (4, 5, 1), (4, 7, 9), (16, 33, 16)):
        held = [
            -(-(stored + step) // size) - max(0, stored - window + 1) // size
            for stored in range(5 * window)
            for step in range(1, most + 1)
        ]
        charged = cache_groups.most_held(window, most, size)
        assert charged - 1 <= max(held) <= charged


def test_what_rows_have_yet_to_take() -> None:
    """Rows of 6 and of 0 tokens, to become 30 and 12 in steps of 4; blocks of 3."""
    rows = memory.create(rows=2, blocks=40, block_size=3, blocks_per_row=10, windows=(None, 5, 30))
    rows = slide(grown(rows, [6, 0]))
    gap_B = jnp.array([8, 4])
    # A window of 5 holds ceil(8 / 3) + 1 = 4 at most: 2 - 0 are held, so 2 more, and 4.
    found = outstanding(rows, gap_B, rows.length_B, 4)
    assert int(found) == (8 + 4) + (2 + 4) + (8 + 4)
    whole = memory.create(rows=2, blocks=40, block_size=3, blocks_per_row=10)
    assert int(outstanding(whole, gap_B, whole.length_B, 4)) == 12


def difference(seed: int, slide: Callable[[Rows], Rows] = slide) -> tuple[str | None, Counter]:
    """The first way in which rows differ from lists in a run of random steps, and what it saw."""
    random = np.random.default_rng(seed)
    rows = memory.create(
        rows=ROWS, blocks=BLOCKS, block_size=SIZE, blocks_per_row=CELLS, windows=WINDOWS
    )
    lists = GroupLists(rows=ROWS, blocks=BLOCKS, size=SIZE, windows=WINDOWS)
    seen: Counter[str] = Counter()
    for _ in range(25):
        stored = list(map(len, lists.histories))
        room = [CELLS * SIZE - length for length in stored]
        wanted = random.choice([0, 1, 1, 1, 4, 8], ROWS).tolist()
        tokens = [min(pair) for pair in zip(wanted, room, strict=True)]
        free = len(lists.free)
        rows, copies, fits, demand = reserve(rows, jnp.array(tokens, jnp.int32))
        expected = lists.reserve(tokens)
        if bool(fits) != (expected is not None) or bool(fits) != (int(demand) <= free):
            return "fits", seen
        if fits and int(demand) != free - len(lists.free):
            return "demand", seen
        made = zip(copies.source_C.tolist(), copies.target_C.tolist(), strict=True)
        if [pair for pair in made if pair[1] < BLOCKS] != (expected or []):
            return "copies", seen
        lists.write(rows, expected or [], stored)
        if lists.misread(rows, stored):
            return "reads within a step", seen
        final = [length + int(random.integers(0, 9)) for length in map(len, lists.histories)]
        found = ledger_of(rows, jnp.array(final, jnp.int32))
        if (found.token, found.reserved, found.internal) != lists.ledger(final):
            return "ledger", seen
        rows = shuffle(random, rows, lists, seen)
        before = len(lists.free)
        rows = slide(rows)
        lists.slide()
        seen["released"] += len(lists.free) - before
        seen["refused"] += expected is None
        seen["copied"] += len(expected or [])
        lists.poison(rows)
        if lists.misread(rows, list(map(len, lists.histories))):
            return "reads of the next step", seen
        if wrong := state_difference(rows, lists):
            return wrong, seen
    return None, seen


def shuffle(random: np.random.Generator, rows: Rows, lists: GroupLists, seen: Counter) -> Rows:
    """Perhaps a fork, a release or a reordering, in both."""
    held = [row for row, history in enumerate(lists.histories) if history]
    empty = sorted({*range(ROWS)} - {*held})
    kind = str(random.choice(["release", "reorder", "", ""]))
    if held and empty and random.random() < 0.7:
        kind = "fork"
        parent_B = np.full(ROWS, ROWS, np.int32)
        children = random.choice(empty, random.integers(1, len(empty) + 1), replace=False)
        parent_B[children] = random.choice(held)
        rows = fork(rows, parent_B)
        for child in sorted(children.tolist()):
            lists.fork(child, int(parent_B[child]))
    elif kind == "release" and held:
        leaving = set(random.choice(held, 1 + (len(held) > 2), replace=False).tolist())
        rows = release(rows, np.isin(np.arange(ROWS), list(leaving)))
        lists.release(leaving)
    elif kind == "reorder":
        parent_B = random.integers(0, ROWS, ROWS).astype(np.int32)
        rows = reorder(rows, parent_B)
        lists.reorder(parent_B.tolist())
    else:
        return rows
    seen[kind] += 1
    return rows


def state_difference(rows: Rows, lists: GroupLists) -> str | None:
    pool = jax.tree.map(np.asarray, rows.table.pool)
    if wrong := block_table.faults(rows.table):
        return wrong[0]
    if rows.length_B.tolist() != list(map(len, lists.histories)):
        return "lengths"
    for tables, table_BM in zip(lists.tables, rows.tables, strict=True):
        for table, table_M in zip(tables, table_BM.tolist(), strict=True):
            cells = [BLOCKS if block == GONE else block for block in table]
            if table_M != cells + [BLOCKS] * (CELLS - len(cells)):
                return "tables"
    queue = [int(pool.queue_N[(pool.head + rank) % BLOCKS]) for rank in range(pool.free)]
    released = sum(table.count(GONE) for tables in lists.tables for table in tables)
    if queue != lists.free:
        return "free queue"
    return None if int(rows.passed or 0) == released else "passed"


def test_rows_of_groups_agree_with_lists() -> None:
    total: Counter[str] = Counter()
    for seed in range(14):
        found, seen = difference(seed)
        assert found is None, (seed, found)
        total += seen
    names = ("released", "refused", "copied", "fork", "release", "reorder")
    assert all(total[name] > 10 for name in names), total


def token_early(behind: Callable) -> Callable:
    return lambda stored, window, size: behind(stored, window - (window > 1), size)


def token_late(behind: Callable) -> Callable:
    return lambda stored, window, size: behind(stored, window + 1, size)


def block_early(behind: Callable) -> Callable:
    return lambda *arguments: behind(*arguments) + 1


MUTANTS = ((token_early, "reads"), (token_late, "tables"), (block_early, "reads"))


@pytest.mark.parametrize(("mutant", "kind"), MUTANTS)
def test_a_wrong_release_is_seen(monkeypatch: pytest.MonkeyPatch, mutant, kind: str) -> None:
    monkeypatch.setattr(cache_groups, "cells_behind", mutant(cache_groups.cells_behind))
    wrong = jax.jit(lambda rows: rows.slide())
    found = [difference(seed, wrong)[0] for seed in range(5)]
    assert any(one and one.startswith(kind) for one in found), found
    assert all(found)


def test_faults_of_lost_heads_are_found() -> None:
    rows = memory.create(
        rows=ROWS, blocks=BLOCKS, block_size=SIZE, blocks_per_row=CELLS, windows=WINDOWS
    )
    table = slide(grown(rows, [7, 9, 0, 1])).table
    assert block_table.faults(table) == []
    first_B, table_BM = table.first_B, table.table_BM
    for broken in (
        table.replace(first_B=first_B.at[4].add(1)),
        table.replace(first_B=first_B.at[4].add(-1)),
        table.replace(first_B=first_B.at[2].set(1)),
        table.replace(first_B=first_B.at[0].set(-1)),
        table.replace(table_BM=table_BM.at[4, 0].set(0)),
    ):
        assert block_table.faults(broken) != []


def test_a_child_of_a_row_without_its_head_takes_all() -> None:
    table = block_table.create(rows=2, blocks=9, block_size=2, blocks_per_row=4, loses_heads=True)
    share = jax.jit(block_table.fork)
    table, _, _ = jax.jit(block_table.reserve)(table, jnp.array([7, 0]))
    parent_B, fewer_B = jnp.array([2, 0]), jnp.array([0, 6])
    assert share(table, parent_B, fewer_B)[1]
    table = jax.jit(block_table.release_heads)(table, jnp.array([2, 0]))
    same, fits = share(table, parent_B, fewer_B)
    assert not fits
    assert same.table_BM.tolist() == table.table_BM.tolist()
    child, fits = share(table, parent_B)
    assert fits
    assert child.first_B.tolist() == [2, 2]
    assert block_table.faults(child) == []
    with pytest.raises(ValueError, match="release_heads: the table was made to keep its rows"):
        block_table.release_heads(table.replace(first_B=None), jnp.array([2, 0]))


def test_what_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match="caches_prefixes: expected one group without a window"):
        memory.create(
            rows=2, blocks=4, block_size=2, blocks_per_row=2, caches_prefixes=True, windows=(4,)
        )


@pytest.mark.parametrize("fenced", [True, False])
def test_sliding_copies_nothing_large(monkeypatch: pytest.MonkeyPatch, fenced: bool) -> None:
    """Neither the pool nor the tables; without the fence before its write a table would be."""
    if not fenced:
        monkeypatch.setattr(block_table.lax, "optimization_barrier", lambda values: values)
    rows = memory.create(rows=64, blocks=5000, block_size=4, blocks_per_row=77, windows=(None, 16))
    lowered = jax.jit(lambda rows: rows.slide(), donate_argnums=0).lower(rows)
    copies = [line for line in (lowered.compile().as_text() or "").splitlines() if " copy(" in line]
    assert any("5000]" in line or "77]" in line for line in copies) != fenced
