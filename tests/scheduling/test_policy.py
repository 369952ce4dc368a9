"""The rules, one by one: settings, growth, shares, verdicts."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.scheduling import policy

SETTLED = {"waiting": True, "need": 3, "free": 9, "rows": 1, "running": 4, "preempted": False}


def verdict(limits: policy.Limits, **changed: int) -> int:
    """The verdict on a request that fits, but for what is changed."""
    arguments = {name: jnp.asarray(value) for name, value in (SETTLED | changed).items()}
    return int(policy.judge(limits, **arguments))


@pytest.mark.parametrize("fraction", [0, 0.01, 0.5, 0.999])
@pytest.mark.parametrize("blocks", [7, 39, 79, 98, 99, 13000])
def test_watermark_is_a_fraction_of_the_pool_and_a_null_block(blocks, fraction):
    limits = policy.limits(blocks=blocks, watermark=fraction)
    assert limits.watermark == math.floor(fraction * (blocks + 1))
    assert limits.watermark.dtype == limits.rows.dtype == jnp.int32


def test_limits_by_default_limit_nothing():
    limits = policy.limits()
    assert limits.watermark == 0
    assert verdict(limits, rows=2**20, running=2**20) == policy.ADMITTED


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 0}, "rows: expected 1 to 1073741824, got 0"),
        ({"rows": -1}, "rows: expected 1 to 1073741824, got -1"),
        ({"tokens": 0}, "tokens: expected 1 to 1073741824, got 0"),
        ({"watermark": 1.0}, "watermark: expected a fraction .* got 1.0"),
        ({"watermark": -0.1}, "watermark: expected a fraction .* got -0.1"),
        ({"watermark": math.nan}, "watermark: expected a fraction .* got nan"),
        ({"blocks": -7, "watermark": 0.5}, "blocks: expected .* got -7"),
    ],
)
def test_limits_refuse(wrong, message):
    with pytest.raises(ValueError, match=message):
        policy.limits(**wrong)


def test_growth_may_take_the_last_free_block():
    grows = policy.may_grow(jnp.array([0, 4, 5, 6]), jnp.array([0, 5, 5, 5]))
    assert grows.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, policy.ADMITTED),
        ({"need": 9}, policy.SHORT),  # two blocks have to stay free
        ({"need": 7}, policy.ADMITTED),
        ({"need": 9, "running": 0}, policy.ADMITTED),
        ({"need": 10, "running": 0}, policy.SHORT),
        ({"rows": 5}, policy.ROWS),
        ({"rows": 4}, policy.ADMITTED),
        ({"rows": 9, "running": 0}, policy.ROWS),
        ({"rows": 5, "need": 99}, policy.ROWS),
        ({"waiting": False}, policy.IDLE),
        ({"waiting": False, "rows": 5, "need": 99}, policy.IDLE),
        ({"preempted": True}, policy.SHORT),
        ({"preempted": True, "waiting": False}, policy.SHORT),
    ],
)
def test_verdicts(changed, expected):
    assert verdict(policy.limits(rows=8, blocks=19, watermark=0.1), **changed) == expected


@pytest.mark.parametrize("blocks", [7, 39, 79])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_watermark_counts_only_when_something_runs(blocks, fraction):
    kept_free = math.floor(fraction * (blocks + 1))
    need_RF, free_RF = np.meshgrid(np.arange(blocks + 2), np.arange(blocks + 1), indexing="ij")
    for running, reserve in ((0, 0), (1, kept_free)):
        verdict_RF = policy.judge(
            policy.limits(blocks=blocks, watermark=fraction),
            waiting=jnp.bool_(True),
            need=jnp.asarray(need_RF),
            free=jnp.asarray(free_RF),
            rows=jnp.int32(1),
            running=jnp.int32(running),
            preempted=jnp.bool_(False),
        )
        fits_RF = free_RF - need_RF >= reserve
        assert np.array_equal(verdict_RF, np.where(fits_RF, policy.ADMITTED, policy.SHORT))


@pytest.mark.parametrize(
    ("chunked", "wanted", "before", "expected"),
    [
        (True, 5, 0, 5),
        (True, 5, 6, 4),
        (True, 5, 12, 0),
        (False, 5, 5, 5),
        (False, 5, 6, 0),
    ],
)
def test_a_budget_of_ten_is_shared_in_order(chunked, wanted, before, expected):
    limits = policy.limits(tokens=10, chunked=chunked)
    cut = policy.share(limits, jnp.int32(wanted), jnp.int32(before), limits.tokens)
    assert cut == expected


def test_a_spent_budget_is_a_verdict_of_its_own():
    assert verdict(policy.limits(), granted=0) == policy.BUDGET
    assert verdict(policy.limits(), granted=0, need=99) == policy.BUDGET
    assert verdict(policy.limits(), granted=0, waiting=False) == policy.IDLE
