"""Plans over whole arrays against a loop that takes one decision at a time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from paged_jax.scheduling import policy, schedule

REQUESTS, BLOCKS, CASES = 8, 24, 1500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Random requests; what each holds is a set of blocks, some held by several, some pinned."""

    states: list[str]  # running, waiting or away
    demand: list[int]
    held: list[set[int]]
    pinned: set[int]
    need: list[int]
    rows: list[int]
    free: int
    most_rows: int
    watermark: int


def draw(rng: random.Random, shared: bool) -> Case:
    some_states = rng.choice(["running running waiting away", "waiting away"]).split()
    states = [rng.choice(some_states) for _ in range(REQUESTS)]
    held = [set(rng.sample(range(BLOCKS), rng.randint(0, 6))) for _ in range(REQUESTS)]
    if not shared:  # each from a stretch of its own
        held = [{3 * r + n % 3 for n in blocks} for r, blocks in enumerate(held)]
    return Case(
        states=states,
        demand=[rng.randint(0, 3) for _ in states],
        held=held,
        pinned=set(rng.sample(range(BLOCKS), 3)) if shared else set(),
        need=[rng.randint(0, 5) for _ in states],
        rows=[rng.randint(1, 3) for _ in states],
        free=rng.choice([0, 1, 3, 9, 20]),
        most_rows=rng.choice([3, 9, 99]),
        watermark=rng.choice([0, 0, 2]),
    )


def decide(case: Case, skips: bool = False) -> tuple[list[bool], list[bool], list[bool], int]:
    """Preempts one at a time, then admits one at a time: kept, preempted, admitted, the verdict.

    ``skips`` breaks the order: whoever does not fit is passed over.
    """
    kept = [r for r in range(REQUESTS) if case.states[r] == "running"]
    victims: list[int] = []
    free = case.free
    while kept and sum(case.demand[r] for r in kept) > free:
        victims.append(kept.pop())
        others = case.pinned.union(*(case.held[r] for r in kept))
        free += len(case.held[victims[-1]] - others)
    free -= sum(case.demand[r] for r in kept)
    rows = sum(case.rows[r] for r in kept)
    admitted: list[int] = []
    verdict = policy.SHORT if victims else policy.IDLE
    for r in range(REQUESTS):
        if case.states[r] != "waiting" or (verdict != policy.IDLE and (victims or not skips)):
            continue
        if rows + case.rows[r] > case.most_rows:
            verdict = policy.ROWS
        elif case.need[r] + (case.watermark if rows else 0) > free:
            verdict = policy.SHORT
        else:
            admitted.append(r)
            rows += case.rows[r]
            free -= case.need[r]
    marks = [[r in some for r in range(REQUESTS)] for some in (kept, victims, admitted)]
    return marks[0], marks[1], marks[2], verdict


def host(values: Any) -> Any:
    """An array of NumPy's: stacking thousands of a device's takes seconds."""
    array = np.array(values)
    return array if array.dtype == bool else array.astype(np.int32)


def as_arrays(case: Case) -> tuple:
    """Counts, limits, and who holds which block."""
    counts = schedule.Counts(
        running_R=host([state == "running" for state in case.states]),
        waiting_R=host([state == "waiting" for state in case.states]),
        demand_R=host(case.demand),
        private_R=host([len(blocks) for blocks in case.held]),
        need_R=host(case.need),
        rows_R=host(case.rows),
        free=host(case.free),
    )
    limits = policy.Limits(host(case.most_rows), host(case.watermark))
    running = [case.held[r] if case.states[r] == "running" else set() for r in range(REQUESTS)]
    holds_RN = host([[n in blocks for n in range(BLOCKS)] for blocks in running])
    return counts, limits, holds_RN, host([n in case.pinned for n in range(BLOCKS)])


def plans(cases: list[Case], shared: bool) -> list[tuple]:
    """All cases in one call."""

    def plan(
        counts: schedule.Counts, limits: policy.Limits, holds_RN: jax.Array, pinned_N: jax.Array
    ) -> schedule.Plan:
        def freed_by(marked_R: jax.Array) -> jax.Array:
            leave_N = (holds_RN & marked_R[:, None]).any(axis=0)
            stay_N = (holds_RN & ~marked_R[:, None]).any(axis=0) | pinned_N
            return (leave_N & ~stay_N).sum()

        return schedule.schedule(counts, limits, freed_by=freed_by if shared else None)

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *map(as_arrays, cases))
    result = jax.jit(jax.vmap(plan))(*stacked)
    fields = result.keep_R, result.preempt_R, result.admit_R, result.verdict
    return list(zip(*(field.tolist() for field in fields), strict=True))


ALONE = [draw(random.Random(seed), shared=False) for seed in range(CASES)]
SHARED = [draw(random.Random(seed), shared=True) for seed in range(CASES)]


def test_plans_where_nothing_is_shared():
    expected = [decide(case) for case in ALONE]
    assert plans(ALONE, shared=False) == expected
    assert plans(ALONE, shared=True) == expected  # the loop finds what the closed form does


def test_plans_where_blocks_are_shared():
    assert plans(SHARED, shared=True) == [decide(case) for case in SHARED]


def test_cases_are_worth_a_plan():
    for cases in (ALONE, SHARED):
        expected = [decide(case) for case in cases]
        for verdict in (policy.IDLE, policy.ROWS, policy.SHORT):
            assert sum(plan[3] == verdict for plan in expected) > 100
        assert sum(sum(plan[1]) > 1 for plan in expected) > 100
        assert sum(sum(plan[2]) > 1 for plan in expected) > 100
        assert sum(any(plan[0]) and any(plan[1]) for plan in expected) > 100
        assert sum("running" not in case.states and any(decide(case)[2]) for case in cases) > 100
        assert [decide(case, skips=True) for case in cases] != expected


def judging(change: Callable[..., dict]) -> Callable:
    """``policy.judge`` with some of its arguments changed."""
    judge = policy.judge

    def mutant(limits: policy.Limits, **counts: Any) -> jax.Array:
        changed = change(limits, **counts)
        return judge(changed.pop("limits", limits), **counts | changed)

    return mutant


def oldest_first(counts: schedule.Counts, keep: Callable = schedule._keep_alone) -> jax.Array:
    turned = jax.tree.map(lambda leaf: leaf[::-1] if leaf.ndim else leaf, counts)
    return keep(turned)[::-1]


MUTANTS = {
    "keeps a block free": (policy, "may_grow", lambda demand, free: demand < free),
    "grows too much": (policy, "may_grow", lambda demand, free: demand <= free + 1),
    "needs a block less": (policy, "judge", judging(lambda _, **c: {"need": c["need"] - 1})),
    "no watermark": (
        policy,
        "judge",
        judging(lambda limits, **_: {"limits": limits.replace(watermark=0)}),
    ),
    "a watermark for the first": (
        policy,
        "judge",
        judging(lambda limits, **c: {"need": c["need"] + (c["running"] == 0) * limits.watermark}),
    ),
    "no rows": (policy, "judge", judging(lambda _, **c: {"rows": 0 * c["rows"]})),
    "preempted or not": (policy, "judge", judging(lambda *_, **__: {"preempted": False})),
    "the oldest first": (schedule, "_keep_alone", oldest_first),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_disagree(monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    assert plans(ALONE, shared=False) != [decide(case) for case in ALONE]


def test_the_closed_form_is_wrong_where_blocks_are_shared():
    assert plans(SHARED, shared=False) != [decide(case) for case in SHARED]


def test_arrays_of_different_length_are_refused():
    counts, limits, *_ = as_arrays(ALONE[0])
    with pytest.raises(ValueError, match="rows_R: axis R has size 1"):
        schedule.schedule(counts.replace(rows_R=host([1])), limits)
