"""What does paging cost attention, and how much of the memory's speed is left?

    python -m experiments.kernel_bench --out=results/kernel_bench
    python -m experiments.kernel_bench --out=results/tilings --search

Times decode and prefill over batch, context, block size, splits and type: our kernel on blocks in
random order and, the same kernel, in one piece; JAX's own where the platform has one; over a
contiguous cache one dense product and, on a GPU, PyTorch's attention. Every call of a timed run
reads blocks of its own, caches are emptied between runs, and speed is also given as a fraction of a
copy's in the same process. ``--search`` instead looks for the fastest legal tiling of each shape,
and writes a file for ``pallas_kernels/tuned``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from experiments import (
    attention_contenders,
    attention_inputs,
    command,
    kernel_figures,
    kernel_plan,
    tiling_search,
)
from experiments.kernel_plan import COPY, Cell, Settings
from experiments.kernel_timing import Stopwatch
from paged_jax.measure import environment, progress, results
from paged_jax.measure.timing import Timing
from pallas_kernels import ops
from pallas_kernels.problem import FLOATS, QUANTISED

FLAGS = flags.FLAGS
METRICS = (
    ("microseconds", "us"),  # of a call, the median
    ("fastest_microseconds", "us"),
    ("gigabytes_per_second", "GB/s"),
    ("copy_fraction", "1"),
    ("teraflops", "TFLOP/s"),
    ("compile_seconds", "s"),
)
# What flags do not say. The CPU's is a small model's shape: there xla is timed and no kernel.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "backends": ["xla"],
        "batches": [32],
        "prefill_batches": [1],
        "contexts": [256, 1024],
        "dtypes": ["float32"],
        "query_heads": 8,
        "kv_heads": 2,
        "width": 64,
        "megabytes": 96,
    },
    "gpu": {
        "backends": ["mosaic_gpu"],
        "batches": [8, 32, 128],
        "prefill_batches": [4],
        "contexts": [1024, 4096, 16384],
        "dtypes": ["bfloat16"],
        "query_heads": 32,
        "kv_heads": 8,
        "width": 128,
        "megabytes": 512,
    },
}
DEFAULTS["tpu"] = DEFAULTS["gpu"] | {"backends": ["mosaic_tpu"]}


def define_flags() -> None:
    """The flags of this command; those without a default have one for each platform."""
    flags.DEFINE_list("kernels", list(kernel_plan.KERNELS), "decode, prefill")
    flags.DEFINE_list(
        "contenders",
        list(attention_contenders.CONTENDERS),
        f"of {', '.join(attention_contenders.CONTENDERS)}, where they apply",
    )
    flags.DEFINE_list("backends", None, f"of {', '.join(ops.BACKENDS)}")
    flags.DEFINE_list("lengths", list(kernel_plan.LENGTHS), "full, ragged: a quarter on average")
    flags.DEFINE_list("batches", None, "rows of a decode step")
    flags.DEFINE_list("prefill_batches", None, "rows of a prefill step")
    flags.DEFINE_list("contexts", None, "tokens of the longest row")
    flags.DEFINE_list("block_sizes", ["16", "64"], "slots of a block")
    flags.DEFINE_list("dtypes", None, "of the cache, and of the queries unless it is quantised")
    flags.DEFINE_list("splits", [kernel_plan.AUTO], "parts of a row's cache, or auto")
    flags.DEFINE_integer("query_heads", None, "query heads", lower_bound=1)
    flags.DEFINE_integer("kv_heads", None, "key/value heads", lower_bound=1)
    flags.DEFINE_integer("width", None, "head width", lower_bound=1)
    flags.DEFINE_integer("chunk", 0, "query tokens of a prefill; 0: the context", lower_bound=0)
    flags.DEFINE_integer("repeats", 15, "timed runs; the median counts", lower_bound=1)
    flags.DEFINE_integer("sets", 16, "most calls of a timed run", lower_bound=1)
    flags.DEFINE_integer("megabytes", None, "more than caches hold", lower_bound=1)
    flags.DEFINE_string("out", "results/kernel_bench", "folder of the results")
    flags.DEFINE_bool("resume", False, "go on with an interrupted run in --out")
    flags.DEFINE_bool("search", False, "look for the fastest tilings instead")
    flags.DEFINE_string("tuned", None, "folder of the tilings found, that of the results if unset")
    flags.DEFINE_integer("search_seconds", 60, "for each shape, compilation included", 1)


def main(_: list[str]) -> None:
    settings = settings_of_flags()
    cells, left_out = kernel_plan.plan(settings)
    if settings.platform not in ops.KERNELS:
        print(f"{settings.platform}: kernels would be interpreted, whose times are no speeds")
    for line in left_out:
        print("left out:", line)
    watch = Stopwatch(
        settings,
        size_bytes=_flag("megabytes") * 2**20,
        most_sets=FLAGS.sets,
        repeats=FLAGS.repeats,
    )
    run = environment.describe(_deciding_flags(settings), [attention_inputs.SEED])
    if FLAGS.search:
        tuned = FLAGS.tuned or FLAGS.out
        seconds = FLAGS.search_seconds
        tiling_search.tabulate(cells, watch, seconds, FLAGS.out, tuned, run, resume=FLAGS.resume)
        return
    table = results.Table.open(
        FLAGS.out,
        factors=Cell._fields,
        metrics=METRICS,
        cells=[COPY, *cells],
        run=run,
        resume=FLAGS.resume,
    )
    with table:
        failed = fill(table, cells, watch)
    print(kernel_figures.text(kernel_figures.read(FLAGS.out)))
    for path in kernel_figures.draw(FLAGS.out):
        print(path)
    if failed:
        raise ValueError(f"{failed} of {len(cells)} cells failed, see above")


def fill(table: results.Table, cells: Sequence[Cell], watch: Stopwatch) -> int:
    """Times the cells that the table lacks; returns how many of them failed."""
    copy, copied = watch.time_copy(), 2 * watch.size_bytes
    rate = copied / copy.run_seconds
    if COPY not in table:
        table.append(COPY, _values(copy, copied, 0, rate))
    failed = 0
    with progress.Progress(len(cells), "cells", done=len(table) - 1) as bar:
        for group in kernel_plan.groups(cells):
            timings, errors = watch.time_calls(cell for cell in group if cell not in table)
            for cell, timed in timings.items():
                shape = watch.settings.shape(cell)
                values = _values(timed, shape.moved_bytes(), shape.operations(), rate)
                table.append(cell, values)
            for cell, error in errors.items():
                print(*cell, "failed:", str(error).partition("\n")[0])
            bar.advance(len(timings) + len(errors))
            failed += len(errors)
    return failed


def _values(timed: Timing, moved: int, operations: int, rate: float) -> dict[str, float]:
    """A cell's metrics; ``rate`` is a copy's, in bytes a second."""
    return {
        "microseconds": 1e6 * timed.run_seconds,
        "fastest_microseconds": 1e6 * timed.fastest_seconds,
        "gigabytes_per_second": moved / timed.run_seconds / 1e9,
        "copy_fraction": moved / timed.run_seconds / rate,
        "teraflops": operations / timed.run_seconds / 1e12,
        "compile_seconds": timed.compile_seconds,
    }


def settings_of_flags() -> Settings:
    """The settings, checked. Raises ``ValueError`` naming the flag."""
    platform = jax.default_backend()
    numbers = functools.partial(command.numbers, kind=int, low=1)
    backends = command.choices("backends", _flag("backends"), ops.BACKENDS)
    for backend in backends:
        needed = {kernel: device for device, kernel in ops.KERNELS.items()}.get(backend, platform)
        if needed != platform:
            raise ValueError(
                f"--backends: {backend} needs a {needed} and would be interpreted on a {platform}:"
                " an interpreter's time is no speed"
            )
    splits = [value for value in FLAGS.splits if value != kernel_plan.AUTO]
    command.numbers("splits", splits or [1], int, low=1)
    heads = {name: _flag(name) for name in ("query_heads", "kv_heads", "width")}
    if heads["query_heads"] % heads["kv_heads"]:
        raise ValueError(
            f"--query_heads: expected a multiple of --kv_heads={heads['kv_heads']},"
            f" got {heads['query_heads']}"
        )
    return Settings(
        kernels=command.choices("kernels", FLAGS.kernels, kernel_plan.KERNELS),
        contenders=command.choices("contenders", FLAGS.contenders, attention_contenders.CONTENDERS),
        backends=backends,
        lengths=command.choices("lengths", FLAGS.lengths, kernel_plan.LENGTHS),
        batches=numbers("batches", _flag("batches")),
        prefill_batches=numbers("prefill_batches", _flag("prefill_batches")),
        contexts=numbers("contexts", _flag("contexts")),
        block_sizes=numbers("block_sizes", FLAGS.block_sizes),
        dtypes=command.choices("dtypes", _flag("dtypes"), FLOATS + QUANTISED),
        splits=tuple(FLAGS.splits),
        chunk=FLAGS.chunk,
        platform=platform,
        **heads,
    )


def _flag(name: str) -> Any:
    """A flag's value, or what this platform is asked where it has none."""
    value = FLAGS[name].value
    return DEFAULTS[jax.default_backend()][name] if value is None else value


def _deciding_flags(settings: Settings) -> dict[str, object]:
    """What decides the rows: all but where they go."""
    names = ["repeats", "sets", "search", *(["search_seconds"] if FLAGS.search else [])]
    return (
        dataclasses.asdict(settings)
        | {name: FLAGS[name].value for name in names}
        | {"megabytes": _flag("megabytes")}
    )


if __name__ == "__main__":
    command.run(main, define_flags)
