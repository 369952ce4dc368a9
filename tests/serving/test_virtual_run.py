"""Virtual time: the engine's steps and ledgers, and seconds that follow from what a step reads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paged_jax.config import DeviceConfig, EngineConfig
from paged_jax.model.weights import Loaded
from paged_jax.serving import cost_model, served, trace_run, virtual_run
from paged_jax.serving.engine import Engine
from paged_jax.serving.served import NEVER
from paged_jax.serving.virtual_step import Time
from paged_jax.workload.timed import Timed
from tests.support import models
from tests.support.models import TINY

# Reads bound every step: a second takes this many bytes, and no operation counts.
SLOW = DeviceConfig(
    name="slow",
    memory_bytes=10**6,
    memory_bandwidth=30_000.0,
    flops=1e30,
    host_bandwidth=1.0,
    launch_seconds=0.125,
)
SHAPE = dataclasses.replace(TINY, layers=1)
SLOT_BYTES = 2 * 2 * 8 * 4  # keys and values, heads, width, f32
READ_BYTES = cost_model.weight_bytes(SHAPE) - 61 * 24 * 4  # but for the embedding of 61 tokens
PAGED = EngineConfig(block_size=4, pool_slots=44, max_length=48, rows=6, step_tokens=8)
simulate = functools.partial(virtual_run.run, SHAPE, SLOW, call_steps=64)


def step_seconds(*rows: tuple[int, int]) -> float:
    """Seconds of a step of rows that store (new, all) tokens."""
    slots = sum(new + length for new, length in rows)
    return (READ_BYTES + SLOT_BYTES * slots) / 30_000 + 0.125


def requests_of(*rows: Sequence[Any]) -> Timed:
    """Requests of an arrival, a prompt and an output each."""
    arrival_R, prompt_R, output_R = (np.array(column) for column in zip(*rows, strict=True))
    return Timed(
        arrival_seconds_R=arrival_R.astype(float),
        prompt_R=prompt_R,
        output_R=output_R,
        number_R=np.arange(len(rows)),
    )


def drawn(count: int, prompt: int) -> tuple[Timed, list[list[int]]]:
    """Requests that are all there at once; every other prompt begins as all such prompts do."""
    random = np.random.default_rng(0)
    prompt_R, output_R = random.integers(1, (prompt, 18), size=(count, 2), endpoint=True).T
    requests = requests_of(*zip(np.zeros(count), prompt_R, output_R, strict=True))
    common = random.integers(61, size=prompt)
    own = [random.integers(61, size=length) for length in prompt_R]
    prompts = [(common[: len(one)] if index % 2 else one).tolist() for index, one in enumerate(own)]
    return requests, prompts


@pytest.fixture(scope="module")
def model() -> Loaded:
    return Loaded(config=SHAPE, decoder=models.random_decoder(SHAPE), end_ids=())


def slow(settings: dict[str, Any], static: bool = False) -> Any:
    """A case that only ``--slow`` runs: each takes programs of its own."""
    return pytest.param(settings, static, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("settings", "static"),
    [
        ({"dispatch_steps": 5}, False),
        slow({"step_tokens": 48, "chunked_prefill": False}),
        slow({"step_tokens": 24, "prefix_caching": True}),
        slow({}, static=True),
    ],
    ids=["chunks", "whole prompts", "prefix cache", "static"],
)
def test_steps_are_the_engines(model: Loaded, settings: dict, static: bool) -> None:
    """Nothing but the clock differs: ledgers, who runs and waits, when each ends, what is found."""
    config = dataclasses.replace(PAGED, **settings)
    if static:  # two prompts have to fit into a step, since virtual time computes them in one
        config = trace_run.static_config(dataclasses.replace(config, pool_slots=96))
    requests, prompts = drawn(24, prompt=4 if static else 20)
    engine = Engine(model, config)
    live = trace_run.run(engine, requests, prompts, static=static)
    known = [one + other for one, other in zip(prompts, live.token_ids, strict=True)]
    virtual = simulate(engine.config, requests, static=static, sequences=known)
    np.testing.assert_array_equal(virtual.steps.ledger_XJ, live.steps.ledger_XJ)
    np.testing.assert_array_equal(virtual.steps.running_X, live.steps.running_X)
    np.testing.assert_array_equal(virtual.steps.waiting_X, live.steps.waiting_X)
    np.testing.assert_array_equal(virtual.finish_step_R, live.finish_step_R)
    assert virtual.preemptions == live.preemptions
    assert static or virtual.preemptions > 5
    assert (virtual.hits is not None) == config.prefix_caching
    if virtual.hits and live.hits:
        rates = dataclasses.astuple(virtual.hits)
        assert rates == pytest.approx(dataclasses.astuple(live.hits))
        assert min(rates) > 0.05
    assert [len(ids) for ids in live.token_ids] == requests.output_R.tolist()


def test_seconds_follow_from_what_is_read() -> None:
    """The second request comes while the first is served, the third long after both have ended."""
    first = [step_seconds((5, 5))]
    both = step_seconds((1, 6), (2, 2))
    arrival = first[0] / 2
    found = simulate(PAGED, requests_of((0, 5, 3), (arrival, 2, 1), (100, 3, 1)))
    last = first[0] + both + step_seconds((1, 7))
    alone = 100 + step_seconds((3, 3))
    assert found.start_seconds_R == pytest.approx([0, first[0], 100])
    assert found.first_seconds_R == pytest.approx([first[0], first[0] + both, alone])
    assert found.finish_seconds_R == pytest.approx([last, first[0] + both, alone])
    assert found.steps.running_X.tolist() == [1, 2, 1, 1]
    assert found.steps.waiting_X.tolist() == [0, 0, 0, 0]
    assert found.finish_step_R.tolist() == [2, 1, 3]
    assert found.queue_seconds_R == pytest.approx([0, arrival, 0])
    assert found.normalised_latency_R[0] == pytest.approx(last / 3)


def test_a_static_batch_is_as_long_as_its_longest() -> None:
    """Two rows: a batch of the first two requests, padded to 7 tokens and 4 steps, then a third."""
    config = trace_run.static_config(dataclasses.replace(PAGED, pool_slots=96))
    found = simulate(config, requests_of((0, 3, 2), (0, 7, 4), (0, 5, 1)), static=True)
    batch = [step_seconds((7, 7), (7, 7))]
    batch += [step_seconds((1, 7 + age), (1, 7 + age)) for age in (1, 2, 3)]
    alone = step_seconds((5, 5))
    assert np.diff(found.steps.seconds_X, prepend=0) == pytest.approx([*batch, alone])
    assert found.finish_step_R.tolist() == [1, 3, 4]
    assert found.start_seconds_R == pytest.approx([0, 0, sum(batch)])
    assert found.steps.waiting_X.tolist() == [1, 1, 1, 1, 0]
    # Whole rows of 48 slots are reserved, and what a row will never fill is internal.
    token, reserved, internal = (
        found.steps.slots(name)[0] for name in ("token", "reserved", "internal")
    )
    assert (token, reserved, internal) == (10, 1 + 3, 96 - 14)


def test_a_run_in_one_call_equals_one_in_many() -> None:
    several, _ = drawn(5, prompt=9)
    for requests in (several, requests_of((0, 5, 14))):  # of 14 steps two calls of 7 leave nothing
        whole = simulate(PAGED, requests)
        steps = len(whole.steps.seconds_X)
        assert 14 <= steps < 64
        pulses: list[served.Pulse] = []
        parts = simulate(PAGED, requests, call_steps=7, watch=pulses.append)
        for name in ("seconds_X", "running_X", "waiting_X", "ledger_XJ"):
            np.testing.assert_array_equal(getattr(parts.steps, name), getattr(whole.steps, name))
        np.testing.assert_array_equal(parts.finish_seconds_R, whole.finish_seconds_R)
        assert len(pulses) == steps // 7 + 1
        assert pulses[-1].finished == requests.count
        assert pulses[-1].tokens == requests.output_R.sum()
        assert pulses[-1].seconds == pytest.approx(whole.finish_seconds_R.max())


def test_what_cannot_be_served_is_refused_and_harms_nobody() -> None:
    alone = simulate(PAGED, requests_of((0, 5, 3), (0, 4, 2)))
    found = simulate(PAGED, requests_of((0, 47, 2), (0, 5, 3), (0, 25, 23), (0, 4, 2)))
    assert set(found.refused) == {0, 2}
    assert "47 tokens and 2 to come pass the context of 48" in found.refused[0]
    assert "need 12 blocks of 4 slots, the pool has 11" in found.refused[2]
    np.testing.assert_array_equal(found.finish_seconds_R[[1, 3]], alone.finish_seconds_R)
    assert np.isnan(found.finish_seconds_R[[0, 2]]).all()
    assert found.finish_step_R[[0, 2]].tolist() == [NEVER, NEVER]
    values = served.measures(found)
    assert (values["served"], values["refused"]) == (2, 2)
    tokens_per_second = 5 / alone.finish_seconds_R.max()
    assert values["output_tokens_per_second"] == pytest.approx(tokens_per_second)


@pytest.mark.parametrize(
    ("settings", "request_", "match"),
    [
        ({}, (0, 47, 2), "no request can be served, the first: prompt: 47 tokens and 2"),
        ({"chunked_prefill": False}, (0, 9, 1), "step_tokens: without chunked_prefill"),
        ({"prefix_caching": True}, (0, 5, 3), "sequences: a prefix cache needs the tokens"),
    ],
)
def test_what_cannot_be_simulated_is_named(settings: dict, request_: tuple, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(dataclasses.replace(PAGED, **settings), requests_of(request_))


def test_measures_are_means_over_the_pool_and_the_requests() -> None:
    found = simulate(PAGED, requests_of((0, 5, 3), (0, 2, 1)))
    values = served.measures(found)
    assert set(values) == {name for name, _ in served.METRICS}
    assert values["token_fraction"] == pytest.approx((7 + 6 + 7) / 3 / 44)
    assert values["running_mean"] == pytest.approx((2 + 1 + 1) / 3)
    fractions = [values[name] for name, unit in served.METRICS if unit == "of pool"]
    assert len(fractions) == 8
    assert sum(fractions) == pytest.approx(1)
    latency = [found.finish_seconds_R[0] / 3, found.finish_seconds_R[1]]
    assert values["normalised_latency_mean"] == pytest.approx(np.mean(latency))
    assert values["normalised_latency_p50"] == pytest.approx(np.mean(latency))
    assert values["first_token_mean"] == pytest.approx(found.finish_seconds_R[1])
    assert np.isnan(values["hit_tokens"])


def test_the_clock_keeps_fractions_after_hours() -> None:
    """100,000 steps of 12.3 ms, from the tenth hour on; f32 alone would be minutes off."""
    start = Time(jnp.int32(36_000), jnp.float32(0.75))
    step = jnp.float32(0.0123)
    end = jax.jit(lambda now: lax.fori_loop(0, 100_000, lambda _, now: now.after(step), now))(start)
    expected = 36_000.75 + 100_000 * float(np.float64(np.float32(0.0123)))
    assert float(end.whole) + float(end.fraction) == pytest.approx(expected, abs=0.01)
    assert 0 <= end.fraction < 1
    assert bool(start <= end)
    assert not bool(end <= start)
    assert bool(start <= start)


def test_nobody_is_served_before_it_arrives() -> None:
    random = np.random.default_rng(2)
    arrival_R = random.choice([0.0, 0.01, 30.0], size=30).cumsum()
    prompt_R = random.integers(1, 20, size=30)
    requests = requests_of(*zip(arrival_R, prompt_R, np.full(30, 4), strict=True))
    found = simulate(PAGED, requests)
    assert (found.queue_seconds_R >= 0).all()
    assert (found.first_seconds_R > found.start_seconds_R).all()
    assert (found.finish_seconds_R > found.first_seconds_R).all()
    assert (np.diff(found.steps.seconds_X) > 0).all()
    late_R = found.queue_seconds_R > 1e-6
    assert 0 < late_R.sum() < 30  # some come while others are served, some while nobody is
