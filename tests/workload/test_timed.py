"""Requests with times: lengths scaled, arrivals in seconds, and prompts as token ids."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paged_jax.workload import Trace, ragged, timed

LENGTHS = Trace(
    format="azure",
    prompt_R=np.array([10, 200, 3, 41]),
    output_R=np.array([5, 1, 30, 2]),
    arrival_seconds_R=np.array([7.0, 7.5, 9.0, 9.0]),
)


def test_the_first_request_comes_at_zero() -> None:
    found = timed.from_trace(LENGTHS, limit=3)
    assert found.arrival_seconds_R.tolist() == [0, 0.5, 2]
    assert found.prompt_R.tolist() == [10, 200, 3]
    assert found.output_R.tolist() == [5, 1, 30]
    assert found.number_R.tolist() == [0, 1, 2]


def test_lengths_are_scaled_to_at_least_one() -> None:
    found = timed.from_trace(LENGTHS, prompt_scale=0.1, output_scale=0.2)
    assert found.prompt_R.tolist() == [1, 20, 1, 4]
    assert found.output_R.tolist() == [1, 1, 6, 1]


def test_too_long_requests_are_left_out_and_the_first_kept_one_comes_at_zero() -> None:
    kept = timed.within(timed.Timed(**_fields([200, 3, 41])), 43)
    assert kept.prompt_R.tolist() == [3, 41]
    assert kept.arrival_seconds_R.tolist() == [0, 1]
    assert kept.number_R.tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"each of 4 requests has more than 5 tokens .* 15"):
        timed.within(timed.from_trace(LENGTHS), 5)


def _fields(prompt: list[int]) -> dict[str, np.ndarray]:
    count = len(prompt)
    return {
        "prompt_R": np.array(prompt),
        "output_R": np.full(count, 2),
        "arrival_seconds_R": np.arange(count, dtype=float),
        "number_R": np.arange(count),
    }


def test_poisson_gaps() -> None:
    """Exponential: mean 1 / rate, as spread as their mean; at another rate the same, stretched."""
    many = timed.Timed(**_fields([1] * 20_000))
    slow, fast = timed.poisson(many, 2.0, seed=3), timed.poisson(many, 8.0, seed=3)
    gap_R = np.diff(slow.arrival_seconds_R)
    assert slow.arrival_seconds_R[0] == 0
    assert gap_R.mean() == pytest.approx(0.5, rel=0.03)
    assert gap_R.std() == pytest.approx(0.5, rel=0.05)
    np.testing.assert_allclose(fast.arrival_seconds_R * 4, slow.arrival_seconds_R)
    assert (timed.poisson(many, 2.0, seed=4).arrival_seconds_R != slow.arrival_seconds_R)[1:].all()


def test_steps_need_their_seconds() -> None:
    steps = Trace(
        format="replay",
        prompt_R=np.array([1, 2]),
        output_R=np.array([1, 2]),
        arrival_steps_R=np.array([0, 4]),
    )
    assert timed.from_trace(steps, step_seconds=0.25).arrival_seconds_R.tolist() == [0, 1]
    with pytest.raises(ValueError, match="step_seconds: the trace's times are steps"):
        timed.from_trace(steps)
    with pytest.raises(ValueError, match="step_seconds: no time of the trace is a step"):
        timed.from_trace(LENGTHS, step_seconds=0.25)
    backlog = dataclasses.replace(steps, arrival_steps_R=np.zeros(2, int))
    assert timed.from_trace(backlog).arrival_seconds_R.tolist() == [0, 0]


def test_prompts_of_token_ids_are_the_traces() -> None:
    trace = Trace(
        format="token ids",
        prompt_R=np.array([3, 4]),
        output_R=np.array([2, 1]),
        prompt_ids=ragged.pack([[5, 60, 700], [5, 60, 9, 8]]),
        output_ids=ragged.pack([[64, 1], [2]]),
    )
    found = timed.from_trace(trace, prompt_scale=0.75)
    assert timed.prompts(found, trace, vocabulary=64, seed=0) == [[5, 60], [5, 60, 9]]
    assert timed.outputs(found, trace, vocabulary=64, seed=0) == [[0, 1], [2]]


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_prompts_of_prefix_ids_begin_alike_where_ids_do(scale: float) -> None:
    trace = Trace(
        format="mooncake",
        prompt_R=np.array([30, 25, 30]),
        output_R=np.array([1, 1, 1]),
        ids=ragged.pack([[0, 1, 2], [0, 1, 3], [4, 5, 6]]),
        ids_tokens=10,
    )
    found = timed.from_trace(trace, prompt_scale=scale)
    one, other, third = timed.prompts(found, trace, vocabulary=10**9, seed=1, prompt_scale=scale)
    shared = round(20 * scale)
    assert [len(one), len(other), len(third)] == found.prompt_R.tolist()
    assert one[:shared] == other[:shared]
    assert one[shared] != other[shared]
    assert not set(one) & set(third)


def test_other_prompts_are_drawn_and_the_same_ones_again() -> None:
    found = timed.from_trace(LENGTHS)
    first = timed.prompts(found, LENGTHS, vocabulary=50, seed=1)
    assert [len(prompt) for prompt in first] == [10, 200, 3, 41]
    assert set(first[1]) == set(range(50))
    later = timed.within(found, 50)
    assert timed.prompts(later, LENGTHS, vocabulary=50, seed=1) == [first[0], first[2], first[3]]
    assert timed.prompts(found, LENGTHS, vocabulary=50, seed=2) != first


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"arrival_seconds_R": np.array([0.0, 2.0, 1.0])}, "times in order"),
        ({"arrival_seconds_R": np.array([-1.0, 2.0, 3.0])}, "times in order"),
        ({"arrival_seconds_R": np.array([0.0, 2.0, np.nan])}, "times in order"),
        ({"arrival_seconds_R": np.array([0.0, 2.0, 2.0**30])}, "below 1073741824 seconds"),
        ({"output_R": np.array([1, 0, 1])}, "output_R: expected at least 1"),
        ({"output_R": np.array([1, 1])}, "axis R"),
    ],
)
def test_what_is_no_request_is_named(change: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        timed.Timed(**{**_fields([1, 2, 3]), **change})


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5, float("nan")])
def test_a_scale_outside_its_range_is_named(scale: float) -> None:
    with pytest.raises(ValueError, match="output_scale: expected above 0 to 1"):
        timed.from_trace(LENGTHS, output_scale=scale)
