"""Compilation is traced once and kept out of the run time."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from paged_jax.measure import timing


def test_compile_and_run_are_apart() -> None:
    traced = []

    def slow_to_trace(values_B: jax.Array) -> jax.Array:
        traced.append(values_B.shape)
        time.sleep(0.2)
        return values_B + 1

    measured = timing.compile_and_time(slow_to_trace, jnp.zeros(3), repeats=3)
    assert traced == [(3,)]
    assert measured.compile_seconds >= 0.2
    assert 0 < measured.run_seconds < 0.1


def test_run_waits_for_the_result() -> None:
    def slow_to_run(value: jax.Array) -> jax.Array:
        def wait(value: jax.Array) -> jax.Array:
            time.sleep(0.05)
            return value

        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), value)

    measured = timing.compile_and_time(slow_to_run, jnp.float32(1), repeats=3)
    assert measured.run_seconds >= measured.fastest_seconds >= 0.05


def test_runs_take_turns_and_what_is_before_them_is_not_timed() -> None:
    order = []

    def before() -> None:
        time.sleep(0.1)
        order.append("before")

    runs = [lambda: order.append("one"), lambda: order.append("two")]
    one, two = timing.time_in_turn(runs, repeats=2, before=before)
    assert order == ["before", "one", "before", "two"] * 2
    assert len(one) == len(two) == 2
    assert max(one + two) < 0.1


def test_no_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="repeats: expected at least 1, got 0"):
        timing.compile_and_time(jnp.sin, 1.0, repeats=0)
