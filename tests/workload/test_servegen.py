"""ServeGen clients: expected counts, burstiness, length laws, windows, refusals."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged_jax.workload import servegen

LENGTHS = {"input_tokens": {"10": 0.25, "30": 0.75}, "output_tokens": {"7": 1.0}}
EMPTY: dict[str, dict] = {"input_tokens": {}, "output_tokens": {}}
CONTENT: dict[str, Any] = {
    "a": {
        "trace": [[0, 0.5, 4.0, "Gamma", 0.0625, 32.0], [600, 0.0, 0.0, "", 0.0, 0.0]],
        "dataset": {"0": LENGTHS},
    },
    "b": {
        "trace": [[0, 0.2, 2.2, "Weibull", 0.5, 2.5], [600, 2.0, 1.0, "Gamma", 1.0, 0.5]],
        "dataset": {"0": LENGTHS, "600": {**LENGTHS, "output_tokens": {"9": 1.0}}},
    },
    "c": {"trace": [[0, 0.0, 0.0, "", 0.0, 0.0]], "dataset": {"0": EMPTY}},
}


def read(tmp_path: Path, content: object) -> tuple[servegen.Client, ...]:
    path = tmp_path / "clients.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert servegen.is_clients(str(path))
    return servegen.read_clients(str(path))


def test_counts_have_the_rates_of_the_windows(tmp_path: Path) -> None:
    clients = read(tmp_path, CONTENT)
    early = [servegen.sample(clients, seed=seed, start=0, stop=600).count for seed in range(300)]
    late = [servegen.sample(clients, seed=seed, start=600, stop=1200).count for seed in range(100)]
    # cv 4 at 300 requests: sd about 70 a window, 4 in the mean of 300. Renewals begun at the
    # window's edge would give (16 - 1) / 2 too many for the first client, 2 for the second.
    assert np.mean(early) == pytest.approx(600 * 0.7, abs=9)
    assert np.std(early) == pytest.approx(np.sqrt(300 * 16 + 120 * 5), rel=0.2)
    assert np.mean(late) == pytest.approx(1200, rel=0.01)
    scaled = [
        servegen.sample(clients, seed=seed, start=0, stop=600, rate_scale=0.5).count
        for seed in range(300)
    ]
    assert np.mean(scaled) == pytest.approx(210, abs=7)


@pytest.mark.parametrize(("pattern", "shape"), [("Gamma", 0.0625), ("Gamma", 3), ("Weibull", 0.5)])
def test_first_wait_is_uniform_in_a_length_biased_gap(pattern: str, shape: float) -> None:
    window = servegen.Window(start=0, rate=1, pattern=pattern, shape=shape)
    gaps = servegen._gaps(window, np.random.default_rng(0), 400_000)
    waits = servegen._first(window, np.random.default_rng(1), 400_000)
    assert gaps.mean() == pytest.approx(1, rel=0.02)
    assert waits.mean() == pytest.approx((gaps**2).mean() / 2 / gaps.mean(), rel=0.03)


def test_requests_do_not_depend_on_the_interval(tmp_path: Path) -> None:
    clients = read(tmp_path, CONTENT)
    whole = servegen.sample(clients, seed=4, start=0, stop=1200)
    part = servegen.sample(clients, seed=4, start=300, stop=700)
    assert whole.arrival_seconds_R is not None
    assert part.arrival_seconds_R is not None
    inside = (whole.arrival_seconds_R >= 300) & (whole.arrival_seconds_R < 700)
    assert (whole.arrival_seconds_R[inside] - 300 == part.arrival_seconds_R).all()
    assert (whole.prompt_R[inside] == part.prompt_R).all()
    assert (np.diff(whole.arrival_seconds_R) >= 0).all()


def test_lengths_are_those_in_force(tmp_path: Path) -> None:
    clients = read(tmp_path, CONTENT)
    early = servegen.sample(clients, seed=0, start=0, stop=600)
    late = servegen.sample(clients, seed=0, start=600, stop=1200)
    assert set(early.output_R.tolist()) == {7}
    assert set(late.output_R.tolist()) == {9}
    assert (late.prompt_R == 30).mean() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("a", "trace", 0), [0, 1], "client a: trace 0: expected"),
        (("a", "trace", 0, 1), -1, "client a: trace 0: expected"),
        (("a", "trace", 0, 1), float("nan"), "client a: trace 0: expected"),
        (("a", "trace", 0, 3), "Pareto", "client a: trace 0: expected .*Gamma or Weibull"),
        (("a", "trace"), 3, 'client a: expected a list "trace"'),
        (("b", "dataset"), {"600": LENGTHS}, "client b: expected lengths in force at 0 s"),
        (("b", "dataset", "0"), [], "client b: dataset 0: expected"),
        (("b", "dataset", "0", "output_tokens"), {}, "dataset 0: output_tokens: expected an obj"),
        (("b", "dataset", "0", "output_tokens"), {"0": 1.0}, "output_tokens: values: "),
        (("b", "dataset", "0", "output_tokens"), {"x": 1.0}, "output_tokens: invalid literal"),
    ],
)
def test_malformed_client_is_refused(
    tmp_path: Path, path: tuple, value: object, message: str
) -> None:
    content = copy.deepcopy(CONTENT)
    place: Any = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize(("start", "stop", "scale"), [(5, 5, 1), (0, 9, 0), (5000, 6000, 1)])
def test_wrong_interval_or_scale_is_refused(
    tmp_path: Path, start: float, stop: float, scale: float
) -> None:
    clients = read(tmp_path, CONTENT)
    with pytest.raises(ValueError, match=r"start, stop|rate_scale"):
        servegen.sample(clients, seed=0, start=start, stop=stop, rate_scale=scale)


def test_published_clients(shared_data: Callable[[str], Path]) -> None:
    path = str(shared_data("servegen_deepseek_r1/deepseek_r1_clients.json.gz"))
    stats = json.loads(shared_data("servegen_deepseek_r1/stats.json").read_text())
    stats = stats["deepseek_r1_clients.json.gz"]
    clients = servegen.read_clients(path)
    assert len(clients) == stats["n_clients"]
    trace = servegen.sample(clients, seed=0, start=0, stop=86_400)
    assert trace.count == pytest.approx(stats["expected_requests"], rel=0.005)
    for name, length_R in (("input_tokens", trace.prompt_R), ("output_tokens", trace.output_R)):
        assert length_R.mean() == pytest.approx(stats[name]["mean"], rel=0.01)
        assert np.median(length_R) == pytest.approx(stats[name]["median"], rel=0.01)
