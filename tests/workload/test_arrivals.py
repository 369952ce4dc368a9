"""Arrival laws: rates and variation measured, order, and independence of the count."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paged_jax.workload import arrivals

LAWS = [
    (arrivals.Poisson(rate=0.01), 1.0),
    (arrivals.Gamma(rate=0.01, cv=3.0), 3.0),
    (arrivals.Gamma(rate=0.01, cv=0.5), 0.5),
    (arrivals.Weibull(rate=0.01, cv=2.0), 2.0),
    (arrivals.Weibull(rate=0.01, cv=0.3), 0.3),
]


@pytest.mark.parametrize(("law", "cv"), LAWS)
def test_rate_and_variation(law: arrivals.Arrivals, cv: float) -> None:
    arrival_R = law.draw(np.random.default_rng(0), 200_000)
    gaps = np.diff(arrival_R)
    assert arrival_R.dtype == np.int32
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(100, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize(("law", "cv"), [*LAWS, (arrivals.Saturated(), 0)])
def test_first_arrivals_do_not_depend_on_count(law: arrivals.Arrivals, cv: float) -> None:
    few, many = (law.draw(np.random.default_rng(3), count) for count in (7, 100))
    assert (few == many[:7]).all()


def test_weibull_shape_against_known_laws() -> None:
    assert arrivals.weibull_shape(1.0) == pytest.approx(1.0)  # the exponential law
    assert arrivals.weibull_shape(math.sqrt(4 / math.pi - 1)) == pytest.approx(2.0)  # Rayleigh
    assert arrivals.weibull_shape(math.sqrt(5)) == pytest.approx(0.5)  # variance 20, mean 2


def test_seconds_become_steps() -> None:
    seconds_R = np.array([0.0, 0.49, 0.5, 3.2])
    assert arrivals.in_steps(seconds_R, 0.5).tolist() == [0, 0, 1, 6]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: arrivals.Poisson(rate=0), "rate: expected a positive number, got 0"),
        (lambda: arrivals.Gamma(rate=1, cv=math.inf), "cv: "),
        (lambda: arrivals.Weibull(rate=1, cv=0.01), "cv: expected 0.05 to 50"),
        (lambda: arrivals.in_steps(np.zeros(1), 0), "step_seconds: "),
        (
            lambda: arrivals.Poisson(rate=1e-9).draw(np.random.default_rng(0), 9),
            "the latest",
        ),
    ],
)
def test_wrong_setting_is_refused(wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
