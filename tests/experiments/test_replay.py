"""The replay oracles of a production block manager at every iteration; the check's controls."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from experiments import replay_check
from experiments.replay import SERIES
from paged_jax.config import Bounds, PoolConfig
from paged_jax.measure.list_allocator import ListAllocator
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import read_trace, replay

# Trace, blocks, block size, watermark, preemptions where the source states them.
ORACLES = [
    ("sharegpt_2000_backlog", 2000, 16, 0.0, 2831),
    ("sharegpt_2000_backlog", 5000, 16, 0.0, 2153),
    ("sharegpt_2000_backlog", 5000, 16, 0.01, None),
    ("sharegpt_2000_backlog", 1250, 64, 0.0, None),
    ("sharegpt_2000_poisson", 5000, 16, 0.0, None),
    ("alpaca_10000_backlog", 2000, 16, 0.0, 2434),
    ("alpaca_10000_backlog", 5000, 16, 0.0, 1283),
]
BOUNDS = Bounds(requests=10_000, output=2_048, blocks=5_000, block_size=64, slots=1)


@pytest.fixture(scope="module")
def folder(shared_data):
    return shared_data("replay")


@pytest.mark.parametrize(("name", "blocks", "block_size", "watermark", "preemptions"), ORACLES)
def test_series_equal_the_oracle_at_every_iteration(
    folder, name, blocks, block_size, watermark, preemptions
):
    suffix = f"_wm{watermark}" if watermark else ""
    oracle = np.load(folder / f"v1_{name}_{blocks}b{block_size}_c0{suffix}.npz")
    result = simulator.simulate(
        replay(read_trace(folder / f"{name}.csv")),
        ALLOCATORS["paged"],
        PoolConfig(pool_slots=blocks * block_size, block_size=block_size),
        steps=2**14,
        limits=policy.limits(blocks=blocks, watermark=watermark),
        skips_idle=True,
        series=tuple(SERIES.values()),
        bounds=BOUNDS,
    )
    for published, ours in SERIES.items():
        np.testing.assert_array_equal(result.series[ours], oracle[published], published)
    if preemptions is not None:
        assert result.sums["preemptions"] == preemptions
    assert not np.asarray(result.run.memory.pool.refcount_N).any()


def write_trace(path):
    rng = np.random.default_rng(0)
    lines = ["arrival_iter,prompt_len,output_len"]
    for arrival in np.sort(rng.integers(0, 60, 40)):
        lines.append(f"{arrival + 3},{rng.integers(1, 40)},{rng.integers(1, 30)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def run_replay(*arguments):
    command = [sys.executable, "-m", "experiments.replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_checks_itself_and_writes_series(tmp_path):
    trace = write_trace(tmp_path / "trace.csv")
    done = run_replay(
        f"--trace={trace}", "--blocks=25", "--block_size=4", "--check", f"--out={tmp_path / 'out'}"
    )
    assert done.returncode == 0, done.stderr
    with (tmp_path / "out" / "rows.csv").open(newline="") as file:
        values = {row["metric"]: float(row["value"]) for row in csv.DictReader(file)}
    assert values["preemptions"] > 0
    assert values["iterations_per_second"] > 0
    assert values["speedup"] == pytest.approx(
        values["iterations_per_second"] / values["list_iterations_per_second"]
    )
    series = np.load(tmp_path / "out" / "series.npz")
    assert {name: len(series[name]) for name in series} == dict.fromkeys(
        SERIES, int(values["iterations"])
    )


def test_check_reports_a_seeded_fault(tmp_path, monkeypatch):
    requests = replay(read_trace(write_trace(tmp_path / "trace.csv")))
    config, limits = PoolConfig(pool_slots=100, block_size=4), policy.limits()
    result = simulator.simulate(
        requests,
        ALLOCATORS["paged"],
        config,
        steps=500,
        skips_idle=True,
        series=tuple(SERIES.values()),
    )

    def check(result):
        return replay_check.check(requests, result, config=config, limits=limits)

    assert check(result) > 0
    token = result.series["token"].copy()
    token[30] += 1
    faulty = dataclasses.replace(result, series={**result.series, "token": token})
    with pytest.raises(ValueError, match="series token differs"):
        check(faulty)
    tables = replay_check.paged.tables
    monkeypatch.setattr(
        replay_check.paged, "tables", lambda *state: [row[: len(row) - 1] for row in tables(*state)]
    )
    with pytest.raises(ValueError, match="iteration 0: running row 0 has"):
        check(result)


@pytest.mark.parametrize(
    ("ours", "counts", "difference"),
    [
        ([[0, 1], [2]], [1, 1, 1, 0], None),
        ([[0], [2, 1]], [1, 1, 1, 0], "running row 0 has 1 blocks"),
        ([[0, 1], [1]], [1, 2, 0, 0], "share blocks differently"),
        ([[0, 1], [2]], [1, 1, 2, 0], "reference counts differ"),
        ([[0, 1], [4]], [1, 1, 0, 0], "outside the pool"),
    ],
)
def test_comparison_sees_every_kind_of_difference(ours, counts, difference):
    found = replay_check.compare([np.array(row) for row in ours], [[7, 5], [9]], np.array(counts))
    assert (found is None) if difference is None else difference in str(found)


def test_list_allocator_serves_by_hand():
    """Two requests of 3 + 3 tokens in blocks of 2, a pool of 4: the second is preempted once."""
    serving = ListAllocator([(2, 3, 3), (2, 3, 3)], blocks=4, block_size=2)
    # Stored 3 + 3; both grow to 4 and fill the pool; the first needs a third block at 5 tokens.
    assert list(serving) == [(2, 4, 6), (2, 4, 8), (1, 3, 5), (1, 3, 5)]
    assert serving.preemptions == 1
    assert sorted(serving.free) == [0, 1, 2, 3]
