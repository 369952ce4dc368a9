"""Confidence intervals against printed tables of Student's t and sums written out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paged_jax.measure import statistics

# Two-sided 95 % points as printed in tables of the t distribution.
PRINTED = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 15: 2.131, 20: 2.086, 29: 2.045, 30: 2.042, 60: 2.000, 120: 1.980,
}  # fmt: skip


@pytest.mark.parametrize(("degrees", "expected"), PRINTED.items())
def test_student_t_is_the_printed_one(degrees: int, expected: float) -> None:
    assert round(statistics.student_t(degrees), 3) == expected


def test_student_t_has_closed_forms() -> None:
    for confidence in (0.5, 0.9, 0.99):
        one = math.tan(math.pi * confidence / 2)  # Cauchy
        two = confidence * math.sqrt(2 / (1 - confidence**2))
        assert statistics.student_t(1, confidence) == pytest.approx(one, rel=1e-12)
        assert statistics.student_t(2, confidence) == pytest.approx(two, rel=1e-12)
    assert statistics.student_t(10_000) == pytest.approx(1.95996398, abs=3e-4)  # normal


@pytest.mark.parametrize(("degrees", "confidence"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_student_t_refuses_what_has_no_answer(degrees: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="expected degrees"):
        statistics.student_t(degrees, confidence)


def test_summary_of_repeats() -> None:
    values = np.array([0.2, 0.25, 0.3, 0.21])
    summary = statistics.summarize(values)
    assert summary.count == 4
    assert summary.mean == pytest.approx(0.24)
    variance = ((values - 0.24) ** 2).sum() / 3
    assert summary.sd == pytest.approx(math.sqrt(variance))
    assert summary.half_width == pytest.approx(3.182446 * math.sqrt(variance / 4), rel=1e-6)


def test_interval_covers_the_mean_in_95_of_100() -> None:
    samples = np.random.default_rng(0).normal(size=(4000, 3))
    summaries = [statistics.summarize(sample) for sample in samples]
    covered = np.mean([abs(summary.mean) <= summary.half_width for summary in summaries])
    assert abs(covered - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 4000)


def test_one_repeat_has_no_spread() -> None:
    summary = statistics.summarize([5])
    assert (summary.count, summary.mean) == (1, 5.0)
    assert math.isnan(summary.sd)
    assert math.isnan(summary.half_width)


def test_equal_repeats_have_none_left() -> None:
    assert statistics.summarize([0.1] * 5).half_width == 0


def test_not_a_number_shows() -> None:
    for value in (math.nan, math.inf):
        summary = statistics.summarize([1.0, value])
        assert math.isnan(summary.sd)
        assert not math.isfinite(summary.mean)


def test_no_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one repeat"):
        statistics.summarize([])
