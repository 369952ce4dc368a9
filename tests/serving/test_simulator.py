"""The simulator: exact sums, native loops, refusals, contiguous serving by its definition."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import Bounds, PoolConfig
from paged_jax.memory import ledger
from paged_jax.memory.allocators import ALLOCATORS, Reserving
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import arrays
from paged_jax.workload.requests import independent
from tests.support.allocators import BuddyModel, FirstFitModel, native_loop
from tests.support.chunk_lists import ChunkServing
from tests.support.list_serving import random_requests


@contextlib.contextmanager
def count_compilations():
    """Names of the functions that XLA compiles meanwhile."""
    names: list[str] = []

    def record(event: str, duration_secs: float, **details: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


BASELINES = sorted(name for name in ALLOCATORS if name != "paged")
SERIES = (*ledger.CATEGORIES, "rows")


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", BASELINES)
def test_contiguous_serving_equals_its_definition(name, samples):
    allocator = ALLOCATORS[name]
    assert isinstance(allocator, Reserving)
    model = FirstFitModel if name.startswith("first_fit") else BuddyModel
    refusals = set()
    for seed in range(3):
        requests = random_requests(seed, 20, samples=samples, same=False, prefixes=(3,))
        for pool_slots in (95 * samples, 130 * samples):
            config = PoolConfig(pool_slots=pool_slots, max_length=40)
            result = simulator.simulate(
                requests,
                ALLOCATORS[name],
                config,
                steps=400,
                series=SERIES,
                bounds=Bounds(requests=20, output=32, blocks=1, block_size=1, slots=400),
            )
            serving = ChunkServing(requests, allocator.promise, model, pool_slots, max_length=40)
            expected = [serving.step() for _ in range(result.steps)]
            for metric in SERIES:
                want = [record[metric] for record in expected]
                np.testing.assert_array_equal(result.series[metric], want, metric)
                assert result.sums[metric] == sum(want)
            assert serving.next == requests.count
            assert not serving.live
            refusals |= {name for name in ("short", "stranded") if result.sums[name]}
            total = sum(result.series[category] for category in ledger.CATEGORIES)
            assert (total == pool_slots).all()
    # Chunks of one size leave holes that the next one fits.
    assert refusals == ({"short"} if "max" in name else {"short", "stranded"})


@pytest.mark.parametrize("name", ["paged", "orca_pow2", "first_fit_oracle"])
@pytest.mark.parametrize("sharing", [{}, {"samples": 2, "prefixes": (5,), "donors": True}])
def test_the_whole_run_is_one_native_loop_without_copies(name, sharing):
    requests = random_requests(0, 300, **sharing)
    config, work = PoolConfig(pool_slots=300, max_length=64), arrays.put(requests)
    bounds = simulator.bounds_of(requests, config)
    compiled = simulator.run.lower(
        work,
        ALLOCATORS[name].create(work, config, bounds),
        simulator.Clock(jnp.int32(0), jnp.int32(9), jnp.bool_(False)),
        policy.limits(),
        verbs=ALLOCATORS[name].verbs,
        output_bound=bounds.output,
    ).compile()
    native, copies = native_loop(compiled)
    assert native
    assert [copy for copy in copies if f"[{len(simulator.METRICS)}]" not in copy] == []


def test_a_loop_that_sorts_is_not_native():
    """Positive control: what XLA cannot take into its native loops is seen."""
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 9, lambda _, x: jnp.sort(x + x[::-1]), x))
    assert not native_loop(loop.lower(jnp.arange(300)).compile())[0]


def test_sums_are_exact_past_32_bits():
    pool_slots, steps = 3_000_000, 3_000
    requests = independent(np.array([2_000_000]), np.array([5_000]))
    result = simulator.simulate(
        requests,
        ALLOCATORS["first_fit_oracle"],
        PoolConfig(pool_slots=pool_slots, max_length=2_005_000),
        steps=steps,
        warmup_steps=7,
    )
    tokens = sum(2_000_000 + step for step in range(7, 7 + steps))
    assert tokens > 2**32
    assert result.sums["token"] == tokens
    assert result.sums["reserved"] == 2_005_000 * steps - tokens
    assert result.sums["free"] == (pool_slots - 2_005_000) * steps


def test_padding_and_bounds_change_nothing():
    requests = random_requests(3, 20, samples=2, prefixes=(4,))
    config = PoolConfig(pool_slots=150, block_size=4)
    results = [
        simulator.simulate(requests, ALLOCATORS["paged"], config, steps=400, bounds=bounds)
        for bounds in (None, Bounds(requests=64, output=50, blocks=99, block_size=7, slots=1))
    ]
    assert results[0].sums == results[1].sums
    assert results[0].steps == results[1].steps < 400


def test_idle_time_is_recorded_or_skipped():
    requests = independent(np.array([3, 3]), np.array([2, 2]), np.array([5, 20]))
    for skips_idle, steps in ((False, 22), (True, 4)):
        result = simulator.simulate(
            requests,
            ALLOCATORS["paged"],
            PoolConfig(pool_slots=8, block_size=4),
            steps=99,
            skips_idle=skips_idle,
        )
        assert (result.steps, result.sums["rows"], result.sums["finished"]) == (steps, 4, 2)
        assert result.exhausted


@pytest.mark.parametrize(
    ("name", "pool_slots", "message"),
    [
        ("paged", 15, "request 1 needs 4 blocks of 4 slots beside 0 pinned ones, the pool has 3"),
        ("orca_oracle", 31, "request 1 needs 1 chunk(s) of 16 contiguous slots"),
        ("first_fit_oracle", 15, "request 1 needs 1 chunk(s) of 16 contiguous slots"),
        ("first_fit_max", 64, "request 1 has 16 tokens, max_length is 12"),
    ],
)
def test_a_request_that_never_fits_is_refused_with_the_numbers(name, pool_slots, message):
    requests = independent(np.array([3, 10]), np.array([2, 6]))
    config = PoolConfig(pool_slots=pool_slots, block_size=4, max_length=12)
    if name == "orca_oracle":  # 16 + 8 + 4 + 2 + 1 has a chunk of 16: one slot less has none
        simulator.simulate(requests, ALLOCATORS[name], config, steps=9)
        config = PoolConfig(pool_slots=15, block_size=4, max_length=12)
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        simulator.simulate(requests, ALLOCATORS[name], config, steps=9)


@pytest.mark.parametrize("name", ["paged", "orca_pow2", "first_fit_oracle"])
def test_one_program_serves_all_block_sizes_and_pools(name):
    bounds = Bounds(requests=20, output=33, blocks=150, block_size=16, slots=151)
    with count_compilations() as compilations:
        for seed in (5, 6):
            requests = random_requests(seed, 20)
            for block_size in (1, 3, 16):
                for pool_slots in (100, 150):
                    config = PoolConfig(pool_slots=pool_slots, block_size=block_size, max_length=64)
                    simulator.simulate(requests, ALLOCATORS[name], config, steps=50, bounds=bounds)
    assert compilations.count("jit(run)") == 1
    assert compilations.count("jit(create)") == (name == "paged")


@pytest.mark.parametrize("bound", ["requests", "output", "blocks", "block_size", "slots"])
def test_bounds_that_are_too_small_are_refused(bound):
    requests = random_requests(0, 20)
    config = PoolConfig(pool_slots=60, block_size=4)
    bounds = simulator.bounds_of(requests, config)
    need = getattr(bounds, bound)
    small = dataclasses.replace(bounds, **{bound: need - 1})
    allocator = ALLOCATORS["first_fit_oracle" if bound == "slots" else "paged"]
    with pytest.raises(ValueError, match=rf"bounds.{bound}: expected at least {need}, got"):
        simulator.simulate(requests, allocator, config, steps=9, bounds=small)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(0, 5), (-3, 0), (5, -1), (2**30 - 5, 5)])
def test_times_out_of_range_are_refused(steps, warmup_steps):
    config = PoolConfig(pool_slots=60, block_size=4)
    with pytest.raises(ValueError, match="steps: expected at least 1"):
        simulator.simulate(
            random_requests(0, 9),
            ALLOCATORS["paged"],
            config,
            steps=steps,
            warmup_steps=warmup_steps,
        )


def test_more_samples_than_rows_are_refused():
    requests = random_requests(0, 9, samples=3)
    config = PoolConfig(pool_slots=200, block_size=4)
    with pytest.raises(simulator.NeverFitsError, match="3 samples, at most 2 rows"):
        simulator.simulate(
            requests, ALLOCATORS["paged"], config, steps=9, limits=policy.limits(rows=2)
        )


@pytest.mark.parametrize("name", ["paged", "orca_oracle"])
def test_64_bit_mode_changes_nothing(name):
    requests, config = random_requests(1, 12, samples=2), PoolConfig(pool_slots=200, max_length=64)
    before = simulator.simulate(requests, ALLOCATORS[name], config, steps=99)
    with jax.enable_x64(True):
        assert simulator.simulate(requests, ALLOCATORS[name], config, steps=99).sums == before.sums
