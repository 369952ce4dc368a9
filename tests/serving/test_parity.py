"""Three forms of the same serving, step by step: Python lists, scalar events, whole arrays.

Plans, ledgers, block tables up to renaming, and reference counts must be equal in every step, for
requests that share through samples, pinned prefixes and donors. The policy exists once, so a
changed rule must part both compiled forms from the lists.
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
from paged_jax.memory import ledger, paged
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy, schedule
from paged_jax.serving import simulator, stepping
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
        rows = sorted(row for row, table in expected["tables"].items() if table)
        tables = paged.tables(memory, np.array(rows, int))
        pins = np.asarray(memory.pool.refcount_N).copy()
        for prefix in pinned(memory, work):
            np.subtract.at(pins, prefix, 1)
        if difference := compare(tables, [expected["tables"][row] for row in rows], pins):
            return f"step {now}: {difference}"
    return None if int(state.queue.finished) == requests.count else "requests are left"


def pinned(memory, work):
    """Blocks of the pinned prefixes: the first ever taken, in order."""
    size, start = int(memory.block_size), 0
    for tokens in np.asarray(work.prefix_tokens_X):
        blocks = -(-int(tokens) // size)
        yield np.arange(start, start + blocks)
        start += blocks


def serve_arrays(work, limits, block_size, pool_slots):
    state = stepping.create(
        work,
        blocks=pool_slots // block_size,
        block_size=block_size,
        blocks_per_row=-(-48 // block_size),
    )

    def step(state, now):
        return stepping.advance(state, work, limits, now, pool_slots)

    return jax.lax.scan(step, state, jnp.arange(STEPS))


def array_differences(requests, records, block_size, pool_slots, watermark, max_rows):
    """Where the engine's form differs from the records of the lists."""
    limits = policy.limits(rows=max_rows, blocks=pool_slots // block_size, watermark=watermark)
    # A function of its own each time: traces are kept by function, and a rule may be a mutant's.
    fresh = functools.partial(serve_arrays, block_size=block_size, pool_slots=pool_slots)
    state, record = jax.device_get(jax.jit(fresh)(arrays.put(requests, REQUESTS + 3), limits))
    if not state.fits:
        return "a plan could not be carried out"
    preemptions = record.plan.preempt_R.sum(axis=1).cumsum()
    sequences = (REQUESTS + 3) * requests.samples
    for now, expected in enumerate(records):
        for name in ledger.CATEGORIES:
            value = getattr(record.ledger, name)[now]
            if value != expected[name]:
                return f"step {now}: {name} is {value}, expected {expected[name]}"
        if preemptions[now] != expected["preemptions"]:
            return f"step {now}: {preemptions[now]} preemptions, not {expected['preemptions']}"
        table_BM, none = record.table.table_BM[now], state.table.pool.none
        rows = [row for row, table in expected["tables"].items() if table]
        counts = record.table.pool.refcount_N[now].copy()
        np.subtract.at(counts, table_BM[sequences:][table_BM[sequences:] != none], 1)
        tables = [table_BM[row][table_BM[row] != none].astype(int) for row in rows]
        if difference := compare(tables, [expected["tables"][row] for row in rows], counts):
            return f"step {now}: {difference}"
    return None if state.copies == records[-1]["copies"] else "copies differ"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_three_forms_agree_step_by_step(pattern):
    preemptions = copies = 0
    for seed in (0, 1):
        requests = random_requests(seed, REQUESTS, **PATTERNS[pattern])
        for pool in POOLS:
            records = serve_lists(requests, *pool)
            assert event_differences(requests, records, *pool) is None, (seed, pool)
            preemptions += records[-1]["preemptions"]
            copies += records[-1]["copies"]
    requests = random_requests(0, REQUESTS, **PATTERNS[pattern])
    for pool in POOLS if pattern == "everything" else POOLS[:1]:
        assert array_differences(requests, serve_lists(requests, *pool), *pool) is None, pool
    assert preemptions > 0  # the pools are small enough for the rules to matter
    assert (copies > 0) == (pattern not in ("alone", "donors"))


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        ("may_grow", lambda demand, free: demand <= free + 1),
        ("may_grow", lambda demand, free: demand < free),
        ("judge", lambda limits, **counts: judge(limits.replace(watermark=0), **counts)),
    ],
    ids=["overcommits", "too_careful", "no_watermark"],
)
def test_a_changed_rule_changes_both_forms(monkeypatch, rule, mutant):
    monkeypatch.setattr(policy, rule, mutant)
    fresh = event_step.__wrapped__()  # traced under the mutant
    parted = {"events": False, "arrays": False}
    for seed in range(4):
        requests = random_requests(seed, REQUESTS)
        records = serve_lists(requests, *POOLS[0])
        parted["events"] |= bool(event_differences(requests, records, *POOLS[0], step=fresh))
        if not parted["arrays"]:
            parted["arrays"] = bool(array_differences(requests, records, *POOLS[0]))
        if all(parted.values()):
            return
    pytest.fail(f"the mutant passed: {parted}")


def test_the_closed_form_and_the_loop_are_one_rule():
    """Requests that share nothing: asking memory victim by victim decides as the sums do."""
    rng = np.random.default_rng(0)
    count = 12
    for _ in range(30):
        running = rng.integers(0, count + 1)
        private_R = rng.integers(1, 5, count)
        counts = schedule.Counts(
            running_R=jnp.arange(count) < running,
            waiting_R=jnp.arange(count) >= running,
            demand_R=jnp.asarray(rng.integers(0, 2, count), jnp.int32),
            private_R=jnp.asarray(private_R, jnp.int32),
            need_R=jnp.asarray(rng.integers(1, 5, count), jnp.int32),
            rows_R=jnp.ones(count, jnp.int32),
            free=jnp.int32(rng.integers(0, 4)),
        )

        def freed_by(marked_R, private_R=private_R):
            return jnp.where(marked_R, private_R, 0).sum()

        plans = (
            schedule.schedule(counts, policy.limits()),
            schedule.schedule(counts, policy.limits(), freed_by=freed_by),
        )
        jax.tree.map(np.testing.assert_array_equal, *plans)
