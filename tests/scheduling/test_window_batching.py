"""Continuous batching over cache groups against Python lists: every step's decisions and blocks."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import block_table, cache_groups, rows
from paged_jax.memory.rows import Rows
from paged_jax.scheduling import policy
from tests.scheduling.test_batching import ROWS, book_of, step_of
from tests.support.window_batching import WindowBatching

WINDOWS = (None, 4)
BLOCKS, SIZE = 56, 2


def long_outputs(seed: int):
    """Of three samples each, which is what a preemption leaves much to be computed of."""
    random = np.random.default_rng(seed)
    return [
        (
            int(random.integers(0, 12)),
            int(random.integers(1, 9)),
            random.integers(4, 29, 3).tolist(),
        )
        for _ in range(10)
    ]


def differences(seed: int, step, *, budget: int) -> tuple[str | None, Counter]:
    """The first way in which the arrays differ from the lists, and what the run went through."""
    requests = sorted(long_outputs(seed), key=lambda one: one[0])
    lists = WindowBatching(
        requests, windows=WINDOWS, rows=ROWS, budget=budget, chunked=True, blocks=BLOCKS, size=SIZE
    )
    limits = policy.limits(rows=ROWS, tokens=budget)
    memory = rows.create(
        rows=ROWS, blocks=BLOCKS, block_size=SIZE, blocks_per_row=20, windows=WINDOWS
    )
    book = book_of(requests)
    seen: Counter[str] = Counter()
    arrival_R = jnp.array([arrival for arrival, _, _ in requests])
    for now in range(400):
        if len(lists.ended) == len(lists.drawn):
            left = int(memory.table.pool.used)
            faults = block_table.faults(memory.table)
            return (f"{left} blocks are left, {faults}" if faults or left else None), seen
        expected = lists.step()
        before = int(memory.table.pool.used)
        book, memory, found = step(book, memory, limits, arrival_R <= now)
        seated, _, plan, draws_B, _, crowded = jax.tree.map(np.asarray, found)
        keys = [*zip(seated.owner_B.tolist(), seated.sample_B.tolist(), strict=True)]
        values = {
            "granted": {key: int(n) for key, n in zip(keys, plan.tokens_B, strict=True) if n},
            "admitted": np.flatnonzero(plan.admitted_R).tolist(),
            "preempted": np.flatnonzero(plan.preempted_R).tolist(),
            "short": bool(plan.verdict == policy.SHORT),
            "drew": sorted(key for key, draws in zip(keys, draws_B, strict=True) if draws),
        }
        for name, value in values.items():
            if value != expected[name]:
                return f"step {now}: {name} is {value}, expected {expected[name]}", seen
        used = int(memory.table.pool.used)
        if used != lists.used() or used != BLOCKS - len(lists.free):
            return f"step {now}: {used} blocks, expected {lists.used()}", seen
        if crowded != bool(expected["preempted"]):
            return f"step {now}: demand and preemptions disagree", seen
        seen["preempted"] += len(expected["preempted"])
        seen["admitted"] += len(expected["admitted"])
        seen["short"] += expected["short"] and not expected["preempted"]
        seen["fell"] += used < before
    return "requests are left", seen


one_step = jax.jit(step_of)


@pytest.mark.parametrize("budget", [9, 20])
def test_steps_equal_lists(budget: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(6):
        found, seen = differences(seed, one_step, budget=budget)
        assert found is None, (seed, found)
        total += seen
    assert all(total[name] > 5 for name in ("preempted", "admitted", "short", "fell")), total


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["charged less", "charged for all", "slides never"])
def test_a_seeded_fault_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "charged less":
        most = cache_groups.most_held
        monkeypatch.setattr(cache_groups, "most_held", lambda *arguments: most(*arguments) - 1)
    elif fault == "charged for all":
        monkeypatch.setattr(Rows, "need", lambda self, blocks, *_: 2 * blocks)
    else:
        monkeypatch.setattr(Rows, "slide", lambda self: self)
    fresh = jax.jit(lambda *state: step_of(*state))
    assert any(differences(seed, fresh, budget=9)[0] for seed in range(12))
