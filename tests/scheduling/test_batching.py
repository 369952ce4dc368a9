"""Continuous batching over arrays against Python lists: every step's plan, tables and draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.replay_check import compare
from paged_jax.memory import block_table, rows
from paged_jax.scheduling import admission, batching, policy
from paged_jax.scheduling import book as books
from tests.support.list_batching import ListBatching

REQUESTS, ROWS, STEPS = 12, 6, 160
POOLS = {1: ((12, 4), (40, 1)), 3: ((17, 4), (58, 1))}  # blocks and their size
CASES: dict[str, dict[str, Any]] = {
    "whole prompts": {"budget": 64, "chunked": False},
    "chunks": {"budget": 9, "chunked": True},
    "no budget": {"budget": 10**6, "chunked": True},
    "watermark": {"budget": 16, "chunked": True, "watermark": 0.2},
}


def requests_of(seed: int, samples: int):
    random = np.random.default_rng(seed)
    arrival = np.sort(random.integers(0, 12, REQUESTS))
    return [
        (int(when), int(random.integers(1, 20)), random.integers(1, 15, samples).tolist())
        for when in arrival
    ]


def book_of(requests) -> books.Book:
    samples = len(requests[0][2])
    empty = books.create(requests=len(requests), samples=samples, rows=ROWS)
    return empty.replace(
        rank_R=jnp.arange(len(requests)),
        prompt_R=jnp.array([prompt for _, prompt, _ in requests]),
        output_RF=jnp.array([outputs for _, _, outputs in requests]),
        live_RF=jnp.ones((len(requests), samples), bool),
    )


def step_of(book, memory, limits, arrived_R):
    calm = batching.only_decodes(book, memory, limits, arrived_R=arrived_R)
    wanted = memory.demand(batching.grants(book, memory, limits))
    crowded = wanted > memory.room
    seated, held, _, step = batching.advance(book, memory, limits, arrived_R=arrived_R)
    draws_B, _ = batching.draws(seated, held, step)
    nothing_B = jnp.zeros(ROWS, jnp.int32)
    book, memory, _ = batching.finish(seated, held, step, draws_B, nothing_B, nothing_B > 0)
    return book, memory, (seated, held, step, draws_B, calm, crowded)


one_step = jax.jit(step_of)


def differences(
    requests,
    *,
    blocks,
    size,
    budget,
    chunked,
    watermark=0.0,
    host=0,
    swapped=1,
    step=one_step,
):
    """The first way in which the arrays differ from the lists, and what the run went through."""
    limits = policy.limits(
        rows=ROWS,
        blocks=blocks,
        tokens=min(budget, 2**30),
        chunked=chunked,
        watermark=watermark,
        swapped=swapped,
    )
    lists = ListBatching(
        requests,
        blocks=blocks,
        size=size,
        rows=ROWS,
        budget=budget,
        chunked=chunked,
        watermark=int(watermark * (blocks + 1)),
        host=host,
        swapped=swapped,
    )
    book = book_of(requests)
    memory = rows.create(rows=ROWS, blocks=blocks, block_size=size, blocks_per_row=-(-40 // size))
    if host:
        memory = memory.with_host(rows=len(lists.drawn), blocks=host)
    arrival_R = jnp.array([arrival for arrival, _, _ in requests])
    seen = {"preempted": 0, "chunks": 0, "calm": 0, "swapped": 0}
    for now in range(STEPS):
        if len(lists.ended) == len(lists.drawn):
            tables = [memory.table, *([memory.host.table] if memory.host else [])]
            faults = [fault for table in tables for fault in block_table.faults(table)]
            left = sum(int(table.pool.used) for table in tables)
            return (faults or left or None), seen
        expected = lists.step()
        book, memory, found = step(book, memory, limits, arrival_R <= now)
        if difference := _compare(expected, found, requests):
            return f"step {now}: {difference}", seen
        seen["preempted"] += len(expected["preempted"])
        seen["swapped"] += len(expected["swapped"])
        seen["chunks"] += sum(tokens > 1 for tokens in expected["granted"].values())
        seen["calm"] += bool(found[4])
    return "requests are left", seen


def _compare(expected, found, requests):
    seated, memory, step, draws_B, calm, crowded = jax.tree.map(np.asarray, found)
    table, samples = memory.table, len(requests[0][2])
    host_length_Z = memory.host.table.length_B if memory.host else ()
    seats = [
        (row, (int(r), int(f)))
        for row, (r, f) in enumerate(zip(seated.owner_B, seated.sample_B, strict=True))
        if r < len(requests)
    ]
    held = [(row, key) for row, key in seats if table.length_B[row]]
    decodes = all(tokens == 1 for tokens in expected["granted"].values())
    everybody = len(expected["granted"]) == len(expected["tables"]) > 0
    events = expected["preempted"] or expected["admitted"]
    values = {
        "granted": {key: int(step.tokens_B[row]) for row, key in seats if step.tokens_B[row]},
        "admitted": np.flatnonzero(step.admitted_R).tolist(),
        "preempted": np.flatnonzero(step.preempted_R).tolist(),
        "swapped": np.flatnonzero(step.swapped_R).tolist(),
        "moved": int(step.moved),
        "host": {
            divmod(row, samples): int(length) for row, length in enumerate(host_length_Z) if length
        },
        "short": bool(step.verdict == policy.SHORT),
        "drew": sorted(key for row, key in seats if draws_B[row]),
    }
    for name, value in values.items():
        if value != expected[name]:
            return f"{name} is {value}, expected {expected[name]}"
    if bool(calm) != (decodes and everybody and not events):
        return f"only_decodes is {bool(calm)}"
    if bool(crowded) != bool(expected["preempted"]):
        return "demand and preemptions disagree"
    if {key for _, key in held} != {key for key, blocks in expected["tables"].items() if blocks}:
        return "other rows hold blocks"
    size = table.block_size
    tables = [
        table.table_BM[row, : -(-int(table.length_B[row]) // size)].astype(np.int64)
        for row, _ in held
    ]
    return compare(tables, [expected["tables"][key] for _, key in held], table.pool.refcount_N)


@pytest.mark.parametrize("host", [0, 24])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_lists(name: str, samples: int, host: int) -> None:
    """With host memory too small for everybody, and requests of which some recompute."""
    total = {
        key: 0 for key in ("preempted", "chunks", "calm", "swapped") if host or key != "swapped"
    }
    for seed in range(6):
        blocks, size = POOLS[samples][seed % 2]
        requests = requests_of(seed, samples)
        settings = {**CASES[name], "host": host, "swapped": 1 + seed % samples}
        difference, seen = differences(requests, blocks=blocks, size=size, **settings)
        assert difference is None, (seed, difference)
        total = {key: count + seen[key] for key, count in total.items()}
        assert host or not seen["swapped"]
    assert all(total.values()), total


def story(requests, steps, *, ranks=None, blocks=10, **limits) -> list[tuple[object, ...]]:
    """Who is admitted, who is preempted and the verdict, step by step, in blocks of 16 slots."""
    book = book_of([(0, prompt, [output]) for prompt, output in requests])
    book = book if ranks is None else book.replace(rank_R=jnp.array(ranks))
    memory = rows.create(rows=ROWS, blocks=blocks, block_size=16, blocks_per_row=12)
    told = []
    for _ in range(steps):
        everybody_R = jnp.ones(len(requests), bool)
        book, memory, (_, _, step, *_) = one_step(
            book, memory, policy.limits(blocks=blocks, **limits), everybody_R
        )
        named = ["".join(map(str, np.flatnonzero(x))) for x in (step.admitted_R, step.preempted_R)]
        told.append((*named, int(step.verdict)))
    return told


def test_the_last_in_order_is_preempted_and_comes_back_first() -> None:
    """Two prompts of 80 tokens fill 10 blocks; the 81st token of the first has no block.

    The third request would fit beside the preemption, and then beside the first, but has to wait.
    """
    idle, short = policy.IDLE, policy.SHORT
    found = story([(80, 3), (80, 9), (16, 9)], 4)
    assert found[:3] == [("01", "", short), ("", "1", short), ("", "", short)]
    assert found[3] == ("12", "", idle)
    by_rank = story([(80, 3), (80, 9), (16, 9)], 2, ranks=[1, 0, 2])
    assert by_rank == [("01", "", short), ("", "0", short)]


def test_the_only_one_preempts_itself() -> None:
    assert story([(160, 3), (1, 1), (1, 1)], 2) == [
        ("0", "", policy.SHORT),
        ("", "0", policy.SHORT),
    ]


@pytest.mark.parametrize("joint", [True, False])
def test_samples_that_draw_together_wait_for_each_other(joint: bool) -> None:
    """They come back with tokens to compute, of which a step takes fewer than they have."""
    limits, parted = policy.limits(rows=ROWS, blocks=40, tokens=5, chunked=True), False
    for drawn in range(7):
        book = book_of([(0, 5, [9] * 3)])
        book = book.replace(drawn_RF=book.drawn_RF + drawn, joint_R=jnp.array([joint]))
        memory = rows.create(rows=ROWS, blocks=40, block_size=4, blocks_per_row=8)
        while book.live_RF.any():
            book, memory, found = one_step(book, memory, limits, jnp.array([True]))
            seated, _, _, draws_B, calm, _ = found
            draws, running = int(draws_B.sum()), int(books.seated(seated).sum())
            parted |= draws not in (0, running)
            assert draws == running or not calm
    assert parted != joint


def test_a_long_prompt_waits_for_a_whole_budget_or_is_cut() -> None:
    """The second prompt does not fit what the first leaves of the budget; the third would."""
    requests = [(30, 2), (40, 2), (5, 2)]
    whole = story(requests, 2, tokens=50, chunked=False)
    assert whole == [("0", "", policy.BUDGET), ("12", "", policy.IDLE)]
    cut = story(requests, 2, tokens=50)
    assert cut == [("01", "", policy.BUDGET), ("2", "", policy.IDLE)]


def test_the_watermark_holds_back_admissions_alone() -> None:
    assert story([(80, 9), (60, 9), (1, 1)], 1, watermark=0.2) == [("0", "", policy.SHORT)]
    assert story([(80, 9), (48, 9), (1, 1)], 1, watermark=0.2) == [("01", "", policy.SHORT)]
    assert story([(160, 1), (1, 1), (1, 1)], 1, watermark=0.2) == [("0", "", policy.SHORT)]


@pytest.mark.parametrize(
    ("fault", "case"), [("budget", "chunks"), ("newest", "chunks"), ("promise", "no budget")]
)
def test_a_seeded_fault_is_seen(monkeypatch: pytest.MonkeyPatch, fault: str, case: str) -> None:
    if fault == "budget":
        share = policy.share
        monkeypatch.setattr(policy, "share", lambda limits, *rest: share(limits, *rest) + 1)
    elif fault == "newest":
        monkeypatch.setattr(jnp, "argmin", jnp.argmax)
    else:
        monkeypatch.setattr(admission, "_outstanding", lambda *_: jnp.int32(0))
    fresh = jax.jit(lambda *state: step_of(*state))  # traces are kept by function
    for seed in range(20):
        blocks, size = POOLS[3][seed % 2]
        found, _ = differences(
            requests_of(seed, 3), blocks=blocks, size=size, step=fresh, **CASES[case]
        )
        if found:
            return
    pytest.fail("nothing was seen")
