"""Which published memory figures does the simulation reproduce, with nothing tuned?

    python -m experiments.published --seeds=8 --out=results/published

Runs the PagedAttention paper's memory experiments in the OPT-13B pool and prints them beside the
published values: Figures 2 and 13 (waste and batch), Figure 15 (parallel sampling), and, as a
regression figure of our own, the memory side of Figure 18b (block size).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from absl import flags

from configs import published, sweeps
from configs.pools import OPT_13B
from experiments import cells, command, plan
from paged_jax.measure import statistics
from paged_jax.workload import Workload, lengths

FLAGS = flags.FLAGS
LAWS = {"sharegpt": lengths.sharegpt, "alpaca": lengths.alpaca}

Comparison = tuple[str, list[float], float]  # label, one value a seed, published value


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_integer("seeds", sweeps.SEEDS, "seeds of each cell", lower_bound=1)
    flags.DEFINE_integer("steps", sweeps.STEPS, "recorded steps of each cell", lower_bound=1)
    flags.DEFINE_bool("resume", False, "go on with an interrupted run in --out")
    flags.DEFINE_string("out", "results/published", "folder of the results")


def main(_: list[str]) -> None:
    for title, compared in figures(FLAGS.out, FLAGS.seeds, FLAGS.steps, resume=FLAGS.resume):
        print(f"{title}\n{'':<24}{'simulated':>16}{'expected':>12}{'difference':>12}")
        for label, values, expected in compared:
            summary = statistics.summarize(values)
            difference = summary.mean - expected
            print(f"{label:<24}{summary.text(2):>16}{expected:>12.2f}{difference:>+12.2f}")
        print()


def figures(
    out: str, seeds: int, steps: int, *, resume: bool = False
) -> Iterator[tuple[str, list[Comparison]]]:
    """Runs every experiment. Yields its title and what it compares; its rows are under ``out``."""
    run = functools.partial(_run, out, seeds, steps, resume)
    yield "Figures 2 and 13: ShareGPT, OPT-13B, % of the pool and running requests", _figure_2(run)
    yield "Figure 15: blocks saved by parallel sampling, Alpaca, %", _figure_15(run)
    for workload, by_size in published.BLOCK_SIZE_TOKENS.items():
        rows = run(f"block_size_{workload}", workload, ("paged",), tuple(by_size))
        yield (
            f"Regression of our own, memory side of Figure 18b: {workload}, token % of the pool",
            [
                (f"block size {size}", rows.percent("token_fraction", block_size=str(size)), token)
                for size, token in by_size.items()
            ],
        )


def _figure_2(run: Callable[..., _Rows]) -> list[Comparison]:
    rows = run("figure_2", "sharegpt", tuple(published.FIGURE_2), (16,))
    return [
        comparison
        for name, (token, external, batch) in published.FIGURE_2.items()
        for comparison in (
            (f"{name} token", rows.percent("token_fraction", allocator=name), token),
            (f"{name} external", rows.percent("external_fraction", allocator=name), external),
            (f"{name} running", rows.values("running_mean", allocator=name), batch),
        )
    ]


def _figure_15(run: Callable[..., _Rows]) -> list[Comparison]:
    compared = []
    for samples, saving in published.FIGURE_15.items():
        rows = run(f"figure_15_{samples}", "alpaca", ("paged",), (16,), samples=samples)
        compared.append((f"{samples} samples", rows.percent("sharing_saving"), saving))
    return compared


def _run(
    out: str,
    seeds: int,
    steps: int,
    resume: bool,
    folder: str,
    workload: str,
    allocators: tuple[str, ...],
    block_sizes: tuple[int, ...],
    *,
    samples: int = 1,
) -> _Rows:
    drawn = Workload(law=LAWS[workload](), max_length=OPT_13B.max_length, samples=samples)
    settings = plan.Settings(
        workloads={workload: drawn},
        allocators=allocators,
        block_sizes=block_sizes,
        sharing=(0.0,),
        pool_slots=(OPT_13B.pool_slots,),
        seeds=seeds,
        steps=steps,
        warmup_steps=sweeps.WARMUP_STEPS,
        watermark=published.WATERMARK,
    )
    decisive = {"steps": steps, "samples": samples}
    return _Rows(cells.tabulate(settings, f"{out}/{folder}", decisive, resume=resume))


class _Rows:
    """Rows of one experiment, to pick one value a seed from."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def values(self, metric: str, **factors: str) -> list[float]:
        """The metric's values in the rows with these factors."""
        wanted = {"metric": metric, **factors}
        return [row["value"] for row in self.rows if wanted.items() <= row.items()]

    def percent(self, metric: str, **factors: str) -> list[float]:
        """The same, in per cent."""
        return [100 * value for value in self.values(metric, **factors)]


if __name__ == "__main__":
    command.run(main, define_flags)
