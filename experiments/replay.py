"""Does the simulator do what a production block manager does, and how fast?

    python -m experiments.replay --trace=sharegpt.csv --blocks=2000 --block_size=16 --out=results/r

Runs a replay trace (``arrival_iter,prompt_len,output_len``) to its end. Writes ``series.npz`` with
``running``, ``used_blocks`` and ``used_tokens``, one entry an iteration, and ``rows.csv``. With
``--check`` a plain-Python list allocator runs beside it: every row's block table, up to renaming
of blocks, and every reference count are compared in every iteration, and both are timed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import command, replay_check
from paged_jax.config import PoolConfig
from paged_jax.measure import environment, results
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import Requests, arrays, read_trace, replay

_TRACE = flags.DEFINE_string("trace", None, "replay trace, CSV", required=True)
_BLOCKS = flags.DEFINE_integer("blocks", None, "blocks of the pool", required=True, lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", 16, "slots of a block", lower_bound=1)
_WATERMARK = flags.DEFINE_float(
    "watermark", 0.0, "fraction of the blocks kept free at an admission while others run"
)
_MAX_ROWS = flags.DEFINE_integer("max_rows", 2**30, "most running sequences", lower_bound=1)
_CHECK = flags.DEFINE_bool("check", False, "compare with a list allocator in every iteration")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed runs; the median counts", lower_bound=1)
_OUT = flags.DEFINE_string("out", "results/replay", "folder of the results")

SERIES = {"running": "rows", "used_blocks": "used", "used_tokens": "token"}
FIRST_BOUND = 2**15  # iterations; a longer trace runs again with room for twice as many


def main(_: list[str]) -> None:
    trace = read_trace(_TRACE.value)
    if trace.arrival_steps_R is None:
        raise ValueError(f"{_TRACE.value}: expected a replay trace, got the format {trace.format}")
    requests = replay(trace)
    run = _Run(requests)
    metrics = [
        ("iterations", "iterations"),
        ("iterations_per_second", "iterations/s"),
        ("compile_seconds", "s"),
        ("preemptions", "requests"),
    ]
    if _CHECK.value:
        metrics += [("list_iterations_per_second", "iterations/s"), ("speedup", "times")]
    cell = (Path(_TRACE.value).name, _BLOCKS.value, _BLOCK_SIZE.value, _WATERMARK.value)
    table = results.Table.open(
        _OUT.value,
        factors=("trace", "blocks", "block_size", "watermark"),
        metrics=metrics,
        cells=[cell],
        run=environment.describe({"max_rows": _MAX_ROWS.value, "check": _CHECK.value}, []),
    )
    with table:
        values = run.measure()
        if _CHECK.value:
            values |= replay_check.check(
                requests,
                run.result,
                config=run.config,
                limits=run.limits,
                watermark_blocks=int(run.limits.watermark),
                max_rows=_MAX_ROWS.value,
            )
            values["speedup"] = (
                values["iterations_per_second"] / values["list_iterations_per_second"]
            )
        _write_series(Path(_OUT.value) / "series.npz", run.result)
        table.append(cell, values)
    for name, unit in metrics:
        print(f"{name:<28}{values[name]:>14,.6g} {unit}")


class _Run:
    """The trace in the simulator, first with compilation, then timed."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.config = PoolConfig(
            pool_slots=_BLOCKS.value * _BLOCK_SIZE.value, block_size=_BLOCK_SIZE.value
        )
        self.limits = policy.limits(
            rows=_MAX_ROWS.value, blocks=_BLOCKS.value, watermark=_WATERMARK.value
        )
        self.work = arrays.put(requests)
        self.steps = FIRST_BOUND
        began = time.perf_counter()
        self.result = self.once()
        self.first_seconds = time.perf_counter() - began
        while self.result.run.queue.finished < requests.count:
            self.steps *= 2
            began = time.perf_counter()
            self.result = self.once()
            self.first_seconds = time.perf_counter() - began

    def once(self) -> simulator.Result:
        return simulator.simulate(
            self.requests,
            ALLOCATORS["paged"],
            self.config,
            steps=self.steps,
            limits=self.limits,
            skips_idle=True,
            series=tuple(SERIES.values()),
            work=self.work,
        )

    def measure(self) -> dict[str, float]:
        seconds = []
        for _ in range(_REPEATS.value):
            began = time.perf_counter()
            self.once()
            seconds.append(time.perf_counter() - began)
        median = float(np.median(seconds))
        return {
            "iterations": self.result.steps,
            "iterations_per_second": self.result.steps / median,
            "compile_seconds": max(self.first_seconds - median, 0.0),
            "preemptions": self.result.sums["preemptions"],
        }


def _write_series(path: Path, result: simulator.Result) -> None:
    """In one step: a reader sees the whole file or none."""
    draft = path.with_name("draft_" + path.name)
    series: dict[str, Any] = {name: result.series[of] for name, of in SERIES.items()}
    np.savez_compressed(draft, **series)
    os.replace(draft, path)


if __name__ == "__main__":
    command.run(main)
