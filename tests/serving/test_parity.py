"""Three forms of the same serving, step by step: Python lists, scalar events, whole arrays.

Plans, ledgers, block tables up to renaming, and reference counts must be equal in every step: of
scalar events for requests that share through samples, pinned prefixes and donors, of the engine's
arrays for requests that share nothing, where it has no budget. The policy exists once, so a changed
rule must part both compiled forms from the lists.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.replay_check import compare
from paged_jax.config import Bounds, PoolConfig
from paged_jax.memory import block_table, ledger, paged, rows
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import batching, policy
from paged_jax.scheduling import book as books
from paged_jax.serving import simulator
from paged_jax.workload import arrays
from tests.support.list_serving import ListServing, random_requests

STEPS = 90
REQUESTS = 16
PATTERNS: dict[str, dict[str, Any]] = {
    "alone": {},
    "samples": {"samples": 3},
    "own_lengths": {"samples": 3, "same": False},
    "prefixes": {"prefixes": (3, 9)},
    "donors": {"donors": True},
    "everything": {"samples": 2, "same": False, "prefixes": (3, 8), "donors": True},
}
POOLS = ((4, 97, 0.05, 99), (1, 90, 0.0, 99), (5, 120, 0.0, 6), (16, 200, 0.0, 99))
judge = policy.judge
METRICS = tuple(name for name in simulator.METRICS if name != "finished")


def serve_lists(requests, block_size, pool_slots, watermark, max_rows):
    serving = ListServing(
        requests,
        pool_slots=pool_slots,
        block_size=block_size,
        watermark=int(watermark * (pool_slots // block_size + 1)),
        max_rows=max_rows,
    )
    records = [serving.step()]
    while len(serving.finished) < requests.count:
        records.append(serving.step())
    assert len(records) < STEPS
    return records


@functools.cache
def event_step():
    """One step of the simulator's form: everything it knows at the moment of record."""

    @jax.jit
    def step(state, work, limits, clock):
        recorded, values = simulator.record(state, work, limits, paged)
        return simulator.retire(recorded, work, clock, paged), recorded.memory, values

    return step


def event_differences(requests, records, block_size, pool_slots, watermark, max_rows, step=None):
    """Where the simulator's form differs from the records of the lists."""
    work = arrays.put(requests)
    config = PoolConfig(pool_slots=pool_slots, block_size=block_size)
    bounds = Bounds(requests=REQUESTS, output=32, blocks=200, block_size=16, slots=1)
    limits = policy.limits(rows=max_rows, blocks=config.blocks, watermark=watermark)
    clock = simulator.Clock(jnp.int32(0), jnp.int32(STEPS), jnp.bool_(False))
    memory = ALLOCATORS["paged"].create(work, config, bounds)
    state = simulator.begin(work, memory, clock, output_bound=bounds.output)
    step = step or event_step()
    copies = preemptions = 0
    for now, expected in enumerate(records):
        state, memory, values = step(state, work, limits, clock)
        values = {name: int(value) for name, value in values.items()}
        values["copies"] = copies = copies + values["copies"]
        values["preemptions"] = preemptions = preemptions + values["preemptions"]
        for name in METRICS:
            if values[name] != expected[name]:
                return f"step {now}: {name} is {values[name]}, expected {expected[name]}"
        if sum(values[name] for name in ledger.CATEGORIES) != pool_slots:
            return f"step {now}: the ledger does not sum to the pool"
        stored = sorted(row for row, table in expected["tables"].items() if table)
        tables = paged.tables(memory, np.array(stored, int))
        pins = np.asarray(memory.pool.refcount_N).copy()
        for prefix in pinned(memory, work):
            np.subtract.at(pins, prefix, 1)
        if difference := compare(tables, [expected["tables"][row] for row in stored], pins):
            return f"step {now}: {difference}"
    return None if int(state.queue.finished) == requests.count else "requests are left"


def pinned(memory, work):
    """Blocks of the pinned prefixes: the first ever taken, in order."""
    size, start = int(memory.block_size), 0
    for tokens in np.asarray(work.prefix_tokens_X):
        blocks = -(-int(tokens) // size)
        yield np.arange(start, start + blocks)
        start += blocks


@functools.cache
def array_step():
    """One step of the engine's form, without a model."""

    @jax.jit
    def step(book, memory, limits, arrived_R):
        book, memory, _, step = batching.advance(book, memory, limits, arrived_R=arrived_R)
        final_B = book.prompt_B() + book.output_RF.at[book.owner_B, 0].get(mode="clip") - 1
        table = memory.table
        slots = block_table.ledger(
            table,
            jnp.where(table.length_B > 0, final_B, 0),
            pool_slots=table.pool.none * table.block_size,
            short=step.verdict == policy.SHORT,
        )
        recorded = (book.owner_B, table, step, slots)
        draws_B, _ = batching.draws(book, memory, step)
        nothing_B = jnp.zeros(draws_B.shape, jnp.int32)
        book, memory, _ = batching.finish(book, memory, step, draws_B, nothing_B, nothing_B > 0)
        return book, memory, recorded

    return step


def array_differences(requests, records, block_size, pool_slots, watermark, max_rows, step=None):
    """Where the engine's form differs from the records of the lists; nothing may be shared."""
    blocks = pool_slots // block_size
    limits = policy.limits(rows=max_rows, blocks=blocks, watermark=watermark)
    book = books.create(requests=REQUESTS, samples=1, rows=REQUESTS).replace(
        rank_R=jnp.arange(REQUESTS),
        prompt_R=jnp.asarray(requests.prompt_R),
        output_RF=jnp.asarray(requests.output_RF),
        live_RF=jnp.ones((REQUESTS, 1), bool),
    )
    memory = rows.create(
        rows=REQUESTS, blocks=blocks, block_size=block_size, blocks_per_row=-(-48 // block_size)
    )
    arrival_R, preemptions, step = jnp.asarray(requests.arrival_R), 0, step or array_step()
    for now, expected in enumerate(records):
        book, memory, recorded = step(book, memory, limits, arrival_R <= now)
        owner_B, held, plan, slots = jax.device_get(recorded)
        for name in set(ledger.CATEGORIES) - {"round_up"}:
            if getattr(slots, name) != expected[name]:
                return f"step {now}: {name} is {getattr(slots, name)}, expected {expected[name]}"
        preemptions += int(plan.preempted_R.sum())
        if preemptions != expected["preemptions"]:
            return f"step {now}: {preemptions} preemptions, not {expected['preemptions']}"
        row_of = {request: row for row, request in enumerate(owner_B) if request < REQUESTS}
        if row_of.keys() != expected["tables"].keys():
            return f"step {now}: others run"
        tables = [held.table_BM[row_of[one]] for one in expected["tables"]]
        tables = [table_M[table_M != held.pool.none].astype(int) for table_M in tables]
        if difference := compare(tables, list(expected["tables"].values()), held.pool.refcount_N):
            return f"step {now}: {difference}"
    return "requests are left" if book.live_RF.any() else None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_forms_agree_step_by_step(pattern):
    preemptions = copies = 0
    for seed in (0, 1):
        requests = random_requests(seed, REQUESTS, **PATTERNS[pattern])
        for pool in POOLS:
            records = serve_lists(requests, *pool)
            assert event_differences(requests, records, *pool) is None, (seed, pool)
            preemptions += records[-1]["preemptions"]
            copies += records[-1]["copies"]
            if pattern == "alone" and pool in POOLS[:2]:  # a shape each
                assert array_differences(requests, records, *pool) is None, (seed, pool)
    assert preemptions > 0  # the pools are small enough for the rules to matter
    assert (copies > 0) == (pattern not in ("alone", "donors"))


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        ("may_grow", lambda demand, free: demand <= free + 1),
        pytest.param(
            *("may_grow", lambda demand, free: demand < free),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("judge", lambda limits, **counts: judge(limits.replace(watermark=0), **counts)),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["overcommits", "too_careful", "no_watermark"],
)
def test_a_changed_rule_changes_both_forms(monkeypatch, rule, mutant):
    monkeypatch.setattr(policy, rule, mutant)
    fresh, fresh_arrays = event_step.__wrapped__(), array_step.__wrapped__()  # of the mutant
    parted = {"events": False, "arrays": False}
    for seed in range(4):
        requests = random_requests(seed, REQUESTS)
        records = serve_lists(requests, *POOLS[0])
        parted["events"] |= bool(event_differences(requests, records, *POOLS[0], step=fresh))
        if not parted["arrays"]:
            parted["arrays"] = bool(
                array_differences(requests, records, *POOLS[0], step=fresh_arrays)
            )
        if all(parted.values()):
            return
    pytest.fail(f"the mutant passed: {parted}")
