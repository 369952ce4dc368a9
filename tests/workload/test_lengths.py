"""Length laws against their definitions, the copula against its promises, the cut by hand."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math

import numpy as np
import pytest

from paged_jax.workload import lengths

LEVELS = ((np.arange(200_000) + 0.5) / 200_000)[:, None]  # their mean quantile is the law's mean


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def figure_11() -> dict:
    files = importlib.resources.files("paged_jax.workload")
    return json.loads(files.joinpath("data/fig11_histograms.json").read_text())


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    ranks = np.array([np.argsort(np.argsort(values)) for values in (first, second)], float)
    return float(np.corrcoef(ranks)[0, 1])


def test_figure_11_means_are_the_printed_ones() -> None:
    data = figure_11()
    for name, pair in (("sharegpt", lengths.sharegpt()), ("alpaca", lengths.alpaca())):
        for side, law in (("input", pair.prompt), ("output", pair.output)):
            entry = data[name][side]
            mean = law.quantile(LEVELS).mean()
            assert abs(mean - entry["printed_mean"]) < entry["width"] / 2
            # Far closer in fact: no bin is shifted by one, which would move a mean by a width.
            assert abs(mean / entry["printed_mean"] - 1) < 1e-3


def test_histogram_gives_each_bin_its_count() -> None:
    entry = figure_11()["alpaca"]["input"]
    drawn = lengths.alpaca().prompt.quantile(LEVELS)
    counted, _ = np.histogram(drawn, bins=entry["bins"], range=(entry["lo"], entry["hi"]))
    expected = np.array(entry["counts"]) / entry["n"] * drawn.size
    assert np.abs(counted - expected).max() <= 2  # a level at each edge of a bin


def test_histogram_is_uniform_in_a_bin() -> None:
    law = lengths.Histogram(low=1, high=8, counts=(3, 1))  # edges 1, 4.5, 8: 1..4 and 5..8
    levels = ((np.arange(16) + 0.5) / 16)[:, None]
    assert law.quantile(levels)[:, 0].tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [
        5,
        6,
        7,
        8,
    ]


@pytest.mark.parametrize(
    ("law", "probability"),
    [
        (lengths.Uniform(low=3, high=7), {value: 1 / 5 for value in range(3, 8)}),
        (lengths.Fixed(tokens=9), {9: 1.0}),
        (
            lengths.Zipf(exponent=1.5, low=2, high=5),
            {k: k**-1.5 / sum(j**-1.5 for j in range(2, 6)) for k in range(2, 6)},
        ),
        (
            lengths.Discrete(values=(1, 4, 6), weights=(1, 0, 3)),
            {1: 0.25, 6: 0.75},
        ),
    ],
)
def test_bounded_law_has_its_probabilities(
    law: lengths.Marginal, probability: dict[int, float]
) -> None:
    values, counts = np.unique(law.quantile(LEVELS), return_counts=True)
    assert dict(zip(values.tolist(), counts / len(LEVELS), strict=True)) == pytest.approx(
        probability, abs=1e-5
    )


def test_lognormal_distribution_function_at_whole_lengths() -> None:
    law = lengths.LogNormal(median=50, sigma=1.2)
    drawn = law.quantile(LEVELS)
    for length in (1, 10, 50, 400):
        below = 0.5 * math.erfc(-math.log(length / 50) / 1.2 / math.sqrt(2))
        assert (drawn <= length).mean() == pytest.approx(below, abs=1e-5)
    extreme = law.quantile(np.array([[2.0**-53], [1 - 2.0**-53]]))
    assert extreme[0, 0] == 1
    assert 1 < extreme[1, 0] < 2**62


@pytest.mark.parametrize("correlation", [-1.0, -0.5, 0.3, 0.8, 1.0])
def test_correlation_is_that_of_ranks_and_keeps_the_marginals(correlation: float) -> None:
    pair = lengths.Pair(
        prompt=lengths.Uniform(low=1, high=10**9), output=lengths.LogNormal(median=1e6, sigma=1)
    )
    alone_R, other_RF = pair.draw(generator(), 20_000)
    prompt_R, output_RF = pair.draw(generator(), 20_000, correlation=correlation)
    assert spearman(prompt_R, output_RF[:, 0]) == pytest.approx(correlation, abs=0.02)
    assert (prompt_R == alone_R).all()
    for share in (0.1, 0.5, 0.9):
        quantiles = np.quantile(output_RF, share), np.quantile(other_RF, share)
        assert quantiles[0] / quantiles[1] == pytest.approx(1, abs=0.06)


def test_correlation_is_monotone_and_zero_by_default() -> None:
    pair = lengths.sharegpt()
    measured = []
    for correlation in (-0.9, -0.4, 0.0, 0.4, 0.9):
        prompt_R, output_RF = pair.draw(generator(1), 5_000, correlation=correlation)
        measured.append(spearman(prompt_R, output_RF[:, 0]))
    assert measured == sorted(measured)
    assert abs(measured[2]) < 0.04


def test_copula_survives_the_last_level() -> None:
    last = np.array([[1 - 2.0**-53], [2.0**-53]])
    coupled = lengths.couple(last, last, 0.7)
    assert (coupled > 0).all()
    assert (coupled < 1).all()


def test_empirical_keeps_pairs_together() -> None:
    prompt_R = np.array([5, 6, 7])
    law = lengths.Empirical(prompt_R=prompt_R, output_R=10 * prompt_R)
    drawn_R, output_RF = law.draw(generator(), 300)
    assert (output_RF[:, 0] == 10 * drawn_R).all()
    assert set(drawn_R.tolist()) == {5, 6, 7}


def test_first_requests_depend_on_neither_count_nor_samples() -> None:
    few = lengths.sharegpt().draw(generator(), 10, correlation=0.4)
    many = lengths.sharegpt().draw(generator(), 50, correlation=0.4, samples=3)
    assert (few[0] == many[0][:10]).all()
    assert (few[1][:, 0] == many[1][:10, 0]).all()
    again = lengths.sharegpt().draw(generator(), 20, correlation=0.4, samples=3)
    assert (again[1] == many[1][:20]).all()
    assert (many[1][:, 0] != many[1][:, 1]).any()


def test_cut_by_hand() -> None:
    prompt_R = np.array([5, 9, 10, 300, 9])
    output_RF = np.array([[5, 2], [1, 1], [1, 1], [7, 1], [1, 2]])
    prompt_R, output_RF, cut_R = lengths.cut(prompt_R, output_RF, 10)
    assert prompt_R.tolist() == [5, 9, 9, 9, 9]
    assert output_RF.tolist() == [[5, 2], [1, 1], [1, 1], [1, 1], [1, 1]]
    assert cut_R.tolist() == [0, 0, 1, 1, 1]


def test_share_of_sharegpt_beyond_2048_is_the_published_one() -> None:
    prompt_R, output_RF = lengths.sharegpt().draw(generator(), 100_000)
    assert lengths.cut(prompt_R, output_RF, 2048)[2].mean() == pytest.approx(0.0064, abs=0.0008)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: lengths.Fixed(tokens=0), "tokens: expected at least 1, got 0"),
        (lambda: lengths.Uniform(low=5, high=4), "low <= high, got 5, 4"),
        (lambda: lengths.LogNormal(median=0, sigma=1), "median: "),
        (lambda: lengths.LogNormal(median=100, sigma=9), "sigma: "),
        (lambda: lengths.Zipf(exponent=math.nan, low=1, high=4), "exponent: "),
        (lambda: lengths.Histogram(low=1, high=3, counts=(1, 1, 1)), "narrower than a token"),
        (lambda: lengths.Histogram(low=1, high=9, counts=(0, 0)), "counts: "),
        (lambda: lengths.Discrete(values=(2, 1), weights=(1, 1)), "increasing"),
        (lambda: lengths.Discrete(values=(1,), weights=(0,)), "weights: "),
        (lambda: lengths.sharegpt().draw(generator(), 3, correlation=1.1), "correlation: "),
        (lambda: lengths.sharegpt().draw(generator(), 3, samples=0), "samples: "),
        (lambda: lengths.cut(np.ones(1), np.ones((1, 1)), 1), "max_length: "),
        (lambda: lengths.Empirical(prompt_R=np.ones(2), output_R=np.ones(1)), "as many prompts"),
        (
            lambda: lengths.Empirical(prompt_R=np.ones(1), output_R=np.ones(1)).draw(
                generator(), 2, correlation=0.5
            ),
            "correlation: a trace has its own",
        ),
    ],
)
def test_wrong_setting_is_refused(wrong, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


def test_laws_are_hashable_settings() -> None:
    assert hash(lengths.sharegpt()) == hash(dataclasses.replace(lengths.sharegpt()))
