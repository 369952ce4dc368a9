"""How much of a KV cache holds tokens, under which allocator, block size and sharing?

    python -m experiments.sweep --workloads=sharegpt,alpaca --block_sizes=1,16,256 --out=results/a

Runs every combination of the factors through the simulator, writes ``rows.csv`` (one observation a
row) and ``run.json`` to ``--out``, prints a table with confidence intervals over seeds, and draws
the figures. A run that was interrupted goes on with ``--resume`` and ends in the same bytes.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from absl import flags

from configs import pools, sweeps
from experiments import cells, command, figures, plan, summary, workloads
from paged_jax.config import MOST
from paged_jax.memory.allocators import ALLOCATORS

FLAGS = flags.FLAGS
MOST_STEPS = 10**7  # requests are drawn up front, for as many steps


def define_flags() -> None:
    """The flags of this command."""
    workloads.define_flags()
    flags.adopt_module_key_flags(workloads)
    flags.DEFINE_list("workloads", list(sweeps.WORKLOADS), f"of {', '.join(workloads.NAMES)}")
    flags.DEFINE_list("allocators", list(ALLOCATORS), f"of {', '.join(ALLOCATORS)}")
    flags.DEFINE_list(
        "block_sizes", [str(size) for size in sweeps.BLOCK_SIZES], "slots of a block; paged alone"
    )
    flags.DEFINE_list(
        "sharing",
        [str(fraction) for fraction in sweeps.SHARING],
        "fractions of requests that begin with a common prefix",
    )
    flags.DEFINE_list(
        "pool_slots", [str(pools.OPT_13B.pool_slots)], "slots of the pool, tokens it has room for"
    )
    flags.DEFINE_integer("seeds", sweeps.SEEDS, "seeds of each cell", lower_bound=1)
    flags.DEFINE_integer(
        "steps", sweeps.STEPS, "recorded steps of each cell, after the warm-up", 1, MOST_STEPS
    )
    flags.DEFINE_integer(
        "warmup_steps", sweeps.WARMUP_STEPS, "steps before the record", 0, MOST_STEPS
    )
    flags.DEFINE_float(
        "watermark", 0.0, "fraction of the blocks kept free at an admission while others run"
    )
    flags.DEFINE_integer("max_rows", MOST, "most running sequences", 1, MOST)
    flags.DEFINE_string("out", "results/sweep", "folder of the results")
    flags.DEFINE_bool("resume", False, "go on with an interrupted run in --out")


def main(_: list[str]) -> None:
    settings = _settings()
    cells.check(settings)
    rows = cells.tabulate(settings, FLAGS.out, _deciding_flags(), resume=FLAGS.resume)
    print(summary.text(rows))
    for path in figures.draw(FLAGS.out):
        print(path)


def _settings() -> plan.Settings:
    names = command.choices("workloads", FLAGS.workloads, workloads.NAMES)
    sharing = command.numbers("sharing", FLAGS.sharing, float, low=0.0, high=1.0)
    chosen = workloads.from_flags(names, shares=max(sharing) > 0)
    replays = chosen.replayed is not None
    if replays and (sharing != (0.0,) or FLAGS.seeds != 1):
        raise ValueError("--arrivals: a replayed trace is what it is: give --sharing=0 --seeds=1")
    pool_slots = command.numbers("pool_slots", FLAGS.pool_slots, int, low=1, high=MOST - 1)
    until_done = replays and not FLAGS["steps"].present
    return plan.Settings(
        workloads=chosen.workloads,
        allocators=command.choices("allocators", FLAGS.allocators, ALLOCATORS),
        block_sizes=command.numbers(
            "block_sizes", FLAGS.block_sizes, int, low=1, high=min(pool_slots)
        ),
        sharing=sharing,
        pool_slots=pool_slots,
        seeds=FLAGS.seeds,
        # A replayed trace is served to its end, and from its beginning, unless flags say otherwise.
        steps=MOST_STEPS if until_done else FLAGS.steps,
        warmup_steps=(0 if replays and not FLAGS["warmup_steps"].present else FLAGS.warmup_steps),
        watermark=FLAGS.watermark,
        max_rows=FLAGS.max_rows,
        replayed=chosen.replayed,
        step_seconds=chosen.step_seconds,
        until_done=until_done,
    )


def _deciding_flags() -> dict[str, object]:
    """Flags of this module and of the workloads that decide rows, and the trace's content."""
    own = FLAGS.flags_by_module_dict()
    deciding: dict[str, object] = {
        flag.name: flag.value
        for module in (sys.argv[0], workloads.__name__)
        for flag in own.get(module, [])
        if flag.name not in ("out", "resume")
    }
    if trace := deciding["trace"]:
        deciding["trace_sha256"] = hashlib.sha256(Path(str(trace)).read_bytes()).hexdigest()
    return deciding


if __name__ == "__main__":
    command.run(main, define_flags)
