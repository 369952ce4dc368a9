"""Does the simulator do what a production block manager does, and how fast?

    python -m experiments.replay --trace=sharegpt.csv --blocks=2000 --block_size=16 --out=results/r

Runs a replay trace (``arrival_iter,prompt_len,output_len``) to its end. Writes ``series.npz`` with
``running``, ``used_blocks`` and ``used_tokens``, one entry an iteration, and ``rows.csv``. With
``--check`` a plain-Python list allocator runs beside it: every row's block table, up to renaming
of blocks, and every reference count are compared in every iteration, and both are timed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import command, replay_check
from paged_jax.config import MOST, PoolConfig
from paged_jax.measure import environment, results
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import Requests, arrays, read_trace, replay

FLAGS = flags.FLAGS
SERIES = {"running": "rows", "used_blocks": "used", "used_tokens": "token"}
METRICS = (
    ("iterations", "iterations"),
    ("iterations_per_second", "iterations/s"),
    ("compile_seconds", "s"),
    ("preemptions", "requests"),
)
CHECK_METRICS = (("list_iterations_per_second", "iterations/s"), ("speedup", "times"))
FIRST_STEPS = 2**15  # a trace that takes more is served again with room for twice as many


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("trace", None, "replay trace, CSV", required=True)
    flags.DEFINE_integer("blocks", None, "blocks of the pool", required=True, lower_bound=1)
    flags.DEFINE_integer("block_size", 16, "slots of a block", lower_bound=1)
    flags.DEFINE_float(
        "watermark", 0.0, "fraction of the blocks kept free at an admission while others run"
    )
    flags.DEFINE_integer("max_rows", MOST, "most running sequences", 1, MOST)
    flags.DEFINE_bool("check", False, "compare with a list allocator in every iteration")
    flags.DEFINE_integer("repeats", 5, "timed runs; the median counts", lower_bound=1)
    flags.DEFINE_string("out", "results/replay", "folder of the results")


def main(_: list[str]) -> None:
    trace = read_trace(FLAGS.trace)
    if trace.arrival_steps_R is None:
        raise ValueError(f"{FLAGS.trace}: expected a replay trace, got the format {trace.format}")
    requests = replay(trace)
    config = PoolConfig(pool_slots=FLAGS.blocks * FLAGS.block_size, block_size=FLAGS.block_size)
    metrics = (*METRICS, *CHECK_METRICS) if FLAGS.check else METRICS
    cell = (Path(FLAGS.trace).name, FLAGS.blocks, FLAGS.block_size, FLAGS.watermark)
    table = results.Table.open(
        FLAGS.out,
        factors=("trace", "blocks", "block_size", "watermark"),
        metrics=metrics,
        cells=[cell],
        run=environment.describe({"max_rows": FLAGS.max_rows, "check": FLAGS.check}, []),
    )
    with table:
        result, values = measure(requests, config)
        if FLAGS.check:
            per_second = replay_check.check(requests, result, config=config, limits=_limits())
            values["list_iterations_per_second"] = per_second
            values["speedup"] = values["iterations_per_second"] / per_second
        _write_series(Path(FLAGS.out) / "series.npz", result)
        table.append(cell, values)
    for name, unit in metrics:
        print(f"{name:<28}{values[name]:>14,.6g} {unit}")


def measure(requests: Requests, config: PoolConfig) -> tuple[simulator.Result, dict[str, float]]:
    """The trace served to its end, and how fast: compilation first, then the median of repeats."""
    steps = FIRST_STEPS
    with simulator.on_cpu():
        work = arrays.put(requests)

    def serve() -> tuple[simulator.Result, float]:
        began = time.perf_counter()
        result = simulator.simulate(
            requests,
            ALLOCATORS["paged"],
            config,
            steps=steps,
            limits=_limits(),
            skips_idle=True,
            series=tuple(SERIES.values()),
            work=work,
        )
        return result, time.perf_counter() - began

    result, first_seconds = serve()
    while result.run.queue.finished < requests.count:
        steps *= 2
        result, first_seconds = serve()
    seconds = float(np.median([serve()[1] for _ in range(FLAGS.repeats)]))
    return result, {
        "iterations": result.steps,
        "iterations_per_second": result.steps / seconds,
        "compile_seconds": max(first_seconds - seconds, 0.0),
        "preemptions": result.sums["preemptions"],
    }


def _limits() -> policy.Limits:
    return policy.limits(rows=FLAGS.max_rows, blocks=FLAGS.blocks, watermark=FLAGS.watermark)


def _write_series(path: Path, result: simulator.Result) -> None:
    """In one step: a reader sees the whole file or none."""
    draft = path.with_name("draft_" + path.name)
    series: dict[str, Any] = {name: result.series[of] for name, of in SERIES.items()}
    np.savez_compressed(draft, **series)
    draft.replace(path)


if __name__ == "__main__":
    command.run(main, define_flags)
