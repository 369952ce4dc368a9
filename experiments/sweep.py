"""How much of a KV cache holds tokens, under which allocator, block size and sharing?

    python -m experiments.sweep --workloads=sharegpt,alpaca --block_sizes=1,16,256 --out=results/a

Runs every combination of the factors through the simulator, writes ``rows.csv`` (one observation a
row) and ``run.json`` to ``--out``, prints a table with 95 % half-widths over seeds, and draws the
figures. A run that was interrupted goes on with ``--resume`` and ends in the same bytes.
"""

from __future__ import annotations

from absl import flags

from configs import pools, sweeps
from experiments import cells, command, figures, summary, workloads
from paged_jax.measure import environment, results
from paged_jax.memory.allocators import ALLOCATORS

_WORKLOADS = flags.DEFINE_list(
    "workloads", list(sweeps.WORKLOADS), f"of {', '.join(workloads.NAMES)}"
)
_ALLOCATORS = flags.DEFINE_list("allocators", list(ALLOCATORS), f"of {', '.join(ALLOCATORS)}")
_BLOCK_SIZES = flags.DEFINE_list(
    "block_sizes", [str(size) for size in sweeps.BLOCK_SIZES], "slots of a block; paged alone"
)
_SHARING = flags.DEFINE_list(
    "sharing",
    [str(fraction) for fraction in sweeps.SHARING],
    "fractions of requests that begin with a common prefix",
)
_POOL_SLOTS = flags.DEFINE_list(
    "pool_slots", [str(pools.OPT_13B.pool_slots)], "slots of the pool, tokens it has room for"
)
_SEEDS = flags.DEFINE_integer("seeds", sweeps.SEEDS, "seeds of each cell", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", sweeps.STEPS, "recorded steps of each cell, after the warm-up", lower_bound=1
)
_WARMUP_STEPS = flags.DEFINE_integer(
    "warmup_steps", sweeps.WARMUP_STEPS, "steps before the record", lower_bound=0
)
_WATERMARK = flags.DEFINE_float(
    "watermark", 0.0, "fraction of the blocks kept free at an admission while others run"
)
_MAX_ROWS = flags.DEFINE_integer("max_rows", 2**30, "most running sequences", lower_bound=1)
_OUT = flags.DEFINE_string("out", "results/sweep", "folder of the results")
_RESUME = flags.DEFINE_bool("resume", False, "go on with an interrupted run in --out")


def main(_: list[str]) -> None:
    settings = _settings()
    table = results.Table.open(
        _OUT.value,
        factors=cells.FACTORS,
        metrics=settings.metrics(),
        cells=settings.cells(),
        run=environment.describe(_deciding_flags(), range(settings.seeds)),
        resume=_RESUME.value,
    )
    with table:
        cells.run(settings, table)
    rows = results.read(_OUT.value)
    print(summary.text(rows))
    for path in figures.draw(_OUT.value):
        print(path)


def _settings() -> cells.Settings:
    chosen = workloads.from_flags(command.choices("workloads", _WORKLOADS.value, workloads.NAMES))
    return cells.Settings(
        workloads=chosen.workloads,
        allocators=command.choices("allocators", _ALLOCATORS.value, ALLOCATORS),
        block_sizes=command.numbers("block_sizes", _BLOCK_SIZES.value, int, low=1),
        sharing=command.numbers("sharing", _SHARING.value, float, low=0.0, high=1.0),
        pool_slots=command.numbers("pool_slots", _POOL_SLOTS.value, int, low=1),
        seeds=_SEEDS.value,
        steps=_STEPS.value,
        warmup_steps=_WARMUP_STEPS.value,
        watermark=_WATERMARK.value,
        max_rows=_MAX_ROWS.value,
        replayed=chosen.replayed,
        step_seconds=chosen.step_seconds,
    )


def _deciding_flags() -> dict[str, object]:
    """Flags of this module and of the workloads, but for those that decide no row."""
    own = flags.FLAGS.flags_by_module_dict()
    return {
        flag.name: flag.value
        for name, module_flags in own.items()
        if name == __name__ or name.startswith("experiments") or name.endswith("sweep.py")
        for flag in module_flags
        if flag.name not in ("out", "resume")
    }


if __name__ == "__main__":
    command.run(main)
