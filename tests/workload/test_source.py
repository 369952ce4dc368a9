"""Drawn and replayed requests: determinism, common random numbers, sharing, the cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paged_jax.workload import (
    Requests,
    Trace,
    Workload,
    arrivals,
    draw,
    lengths,
    ragged,
    replay,
    requests,
    sharing,
)

BASE = Workload(
    law=lengths.sharegpt(),
    max_length=2048,
    correlation=0.3,
    arrivals=arrivals.Gamma(rate=0.2, cv=2),
    sharing=0.4,
    prefix_tokens=(80, 341),
    samples=2,
    sample_lengths="own",
)
FIELDS = [field.name for field in dataclasses.fields(Requests)]


def same(first: Requests, second: Requests, *names: str) -> bool:
    return all((getattr(first, name) == getattr(second, name)).all() for name in names)


def test_same_seed_gives_the_same_bytes_and_another_does_not() -> None:
    first, second = draw(BASE, 7, 200), draw(BASE, 7, 200)
    assert [getattr(first, name).tobytes() for name in FIELDS] == [
        getattr(second, name).tobytes() for name in FIELDS
    ]
    assert not same(first, draw(BASE, 8, 200), "prompt_R")


@pytest.mark.parametrize("sample_lengths", ["same", "own"])
def test_first_requests_do_not_depend_on_count(sample_lengths) -> None:
    workload = dataclasses.replace(BASE, sample_lengths=sample_lengths)
    few, many = draw(workload, 1, 30), draw(workload, 1, 90)
    for name in ("prompt_R", "output_RF", "arrival_R", "prefix_R", "cut_R"):
        assert (getattr(few, name) == getattr(many, name)[:30]).all()


def test_cells_of_a_sweep_share_their_random_numbers() -> None:
    plain = draw(dataclasses.replace(BASE, sharing=0.0), 5, 300)
    for fraction in (0.2, 0.9):
        shared = draw(dataclasses.replace(BASE, sharing=fraction), 5, 300)
        own_R = shared.prefix_R == 2
        assert same(plain, shared, "arrival_R")
        assert (plain.prompt_R == shared.prompt_R)[own_R].all()
        assert (plain.output_RF == shared.output_RF)[own_R].all()
    saturated = dataclasses.replace(BASE, sharing=0.0, arrivals=arrivals.Saturated())
    assert same(plain, draw(saturated, 5, 300), "prompt_R", "output_RF")
    less, more = (draw(dataclasses.replace(BASE, sharing=f), 5, 300).prefix_R for f in (0.2, 0.9))
    assert (less[less < 2] == more[less < 2]).all()


def test_fraction_is_exact_at_its_ends_and_bernoulli_between() -> None:
    for fraction in (0.0, 1.0):
        prefix_R = draw(dataclasses.replace(BASE, sharing=fraction), 0, 500).prefix_R
        assert (prefix_R < 2).mean() == fraction
    prefix_R = draw(dataclasses.replace(BASE, sharing=0.4), 0, 20_000).prefix_R
    assert (np.bincount(prefix_R) / 20_000).tolist() == pytest.approx([0.2, 0.2, 0.6], abs=0.015)


def test_prefix_is_prepended_and_cut() -> None:
    plain = requests.independent(np.array([5, 90, 99]), np.array([[9], [9], [1]]))
    shared = sharing.with_prefixes(plain, 1.0, (10,), np.random.default_rng(0), 100)
    assert shared.prompt_R.tolist() == [15, 99, 99]
    assert shared.output_RF[:, 0].tolist() == [9, 1, 1]
    assert shared.cut_R.tolist() == [0, 1, 1]
    assert shared.prefix_R.tolist() == [0, 0, 0]


def test_samples_of_one_or_of_own_lengths() -> None:
    one = draw(dataclasses.replace(BASE, samples=1), 2, 400)
    equal = draw(dataclasses.replace(BASE, samples=4, sample_lengths="same"), 2, 400)
    own = draw(dataclasses.replace(BASE, samples=4, sample_lengths="own"), 2, 400)
    assert same(one, equal, "prompt_R")
    assert same(one, own, "prompt_R")
    assert (equal.output_RF == one.output_RF).all()  # [400, 4] == [400, 1]
    assert (own.output_RF[:, :1] == one.output_RF).all()
    assert (own.output_RF.std(axis=1) > 0).mean() > 0.95


def test_max_length_holds_and_is_counted() -> None:
    workload = dataclasses.replace(BASE, max_length=600)
    drawn, free = draw(workload, 3, 500), draw(dataclasses.replace(BASE, max_length=10**6), 3, 500)
    assert (drawn.prompt_R + drawn.output_RF.max(axis=1)).max() == 600
    assert (drawn.cut_R == (free.prompt_R + free.output_RF.max(axis=1) > 600)).all()
    assert not free.cut_R.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharing": 1.5}, "fraction: expected 0 to 1, got 1.5"),
        ({"prefix_tokens": ()}, "prefix_tokens: expected a prefix"),
        ({"prefix_tokens": (2047,)}, "prefix_tokens: expected 1 to 2046, got 2047"),
        ({"samples": 0}, "samples: "),
        ({"sample_lengths": "both"}, "sample_lengths: expected same or own, got 'both'"),
        ({"correlation": 2}, "correlation: "),
        ({"max_length": 1}, "max_length: "),
    ],
)
def test_wrong_workload_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(dataclasses.replace(BASE, **change), 0, 5)


def test_replay_keeps_order_arrivals_and_donors() -> None:
    trace = Trace(
        format="made",
        prompt_R=np.array([10, 12, 8, 12]),
        output_R=np.array([1, 2, 3, 4]),
        arrival_seconds_R=np.array([0.0, 0.5, 0.5, 2.0]),
        ids=ragged.pack([[1, 2, 3], [1, 2, 4], [9, 8], [1, 2, 4]]),
        ids_tokens=4,
    )
    replayed = replay(trace, step_seconds=0.25)
    assert replayed.prompt_R.tolist() == [10, 12, 8, 12]
    assert replayed.output_RF[:, 0].tolist() == [1, 2, 3, 4]
    assert replayed.arrival_R.tolist() == [0, 2, 2, 8]
    assert replayed.donor_R.tolist() == [4, 0, 4, 1]
    assert replayed.shared_R.tolist() == [0, 8, 0, 12]
    short = replay(trace, step_seconds=0.25, max_length=11)
    assert short.prompt_R.tolist() == [10, 10, 8, 10]
    assert short.shared_R.tolist() == [0, 8, 0, 10]
    assert short.cut_R.tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="expected none that share"):
        sharing.with_prefixes(replayed, 0.5, (3,), np.random.default_rng(0), 100)
    with pytest.raises(ValueError, match="step_seconds: expected the seconds a step takes"):
        replay(trace)


def test_replay_of_steps_and_of_no_arrivals() -> None:
    three = np.array([3, 4])
    steps = Trace(format="made", prompt_R=three, output_R=three, arrival_steps_R=np.array([2, 9]))
    assert replay(steps).arrival_R.tolist() == [2, 9]
    assert replay(dataclasses.replace(steps, arrival_steps_R=None)).arrival_R.tolist() == [0, 0]
    with pytest.raises(ValueError, match="expected none, as the trace has no times"):
        replay(steps, step_seconds=1.0)


def test_requests_refuse_what_int32_cannot_hold() -> None:
    with pytest.raises(ValueError, match="prompt_R: expected whole numbers of int32"):
        requests.independent(np.array([2**31]), np.array([1]))
    with pytest.raises(ValueError, match="output_RF: expected whole numbers of int32, got float64"):
        requests.independent(np.array([1]), np.array([1.5]))
