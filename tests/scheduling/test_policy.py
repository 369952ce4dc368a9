"""The rules, one by one: settings, growth, verdicts, and what a schedule makes of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.scheduling import policy, schedule
from tests.support.paged_lists import counts

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


plan_of = jax.jit(schedule.schedule)


def plan(states, *, demand, held, need, free, watermark=0.0):
    """A step of requests that run (r) or wait (w), over a pool of 10 blocks.

    Returns what becomes of each, k kept, p preempted, a admitted, w waiting, and the verdict.
    """
    result = plan_of(
        schedule.Counts(
            running_R=jnp.array([state == "r" for state in states]),
            waiting_R=jnp.array([state == "w" for state in states]),
            demand_R=counts(demand),
            private_R=counts(held),
            need_R=counts(need),
            rows_R=jnp.ones(len(states), jnp.int32),
            free=jnp.int32(free),
        ),
        policy.limits(blocks=10, watermark=watermark),
    )
    marks = zip(result.keep_R, result.preempt_R, result.admit_R, strict=True)
    letters = ["k" if k else "p" if p else "a" if a else "w" for k, p, a in marks]
    return "".join(letters), int(result.verdict)


def test_the_youngest_is_preempted_when_an_older_one_grows():
    """Two prompts of 80 tokens fill 10 blocks of 16; the 81st token of the first has no block."""
    full = {"demand": [1, 1], "held": [5, 5], "need": [0, 0], "free": 0}
    assert plan("rr", **full) == ("kp", policy.SHORT)


def test_the_only_one_preempts_itself():
    alone = {"demand": [1, 0], "held": [10, 0], "need": [11, 1], "free": 0}
    assert plan("rw", **alone) == ("pw", policy.SHORT)


def test_nobody_is_admitted_beside_a_preemption():
    """Five blocks become free, and the third request needs one of them."""
    full = {"demand": [1, 1, 0], "held": [5, 5, 0], "need": [0, 0, 1], "free": 0}
    assert plan("rrw", **full) == ("kpw", policy.SHORT)


def test_the_preempted_one_comes_back_first():
    """It waits in front of the third; while it does not fit, the third waits, too."""
    waiting = {"demand": [0, 0, 0], "held": [6, 0, 0], "need": [0, 5, 1]}
    assert plan("rww", **waiting, free=4) == ("kww", policy.SHORT)
    assert plan("rww", **waiting, free=5) == ("kaw", policy.SHORT)
    assert plan("rww", **waiting, free=6) == ("kaa", policy.IDLE)


def test_the_watermark_holds_nobody_back_who_runs():
    full = {"demand": [1, 0], "held": [9, 0], "need": [0, 1], "watermark": 0.2}
    assert plan("rw", **full, free=1) == ("kw", policy.SHORT)
    waiting = {"demand": [0, 0], "held": [0, 0], "need": [6, 4], "watermark": 0.2}
    assert plan("ww", **waiting, free=10) == ("aw", policy.SHORT)
    waiting["need"] = [6, 2]
    assert plan("ww", **waiting, free=10) == ("aa", policy.IDLE)
