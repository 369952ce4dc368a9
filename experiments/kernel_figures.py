"""What does a kernel benchmark show? Its figures and table, from the rows of its folder alone.

    python -m experiments.kernel_figures --out=results/kernel_bench

decode_latency.png   a decode step against the context (Fig. 18a of Kwon et al., SOSP 2023)
prefill_latency.png  the same of whole prompts
block_size.png       a decode step of the longest context against the block size (Fig. 18b)

Full rows are drawn solid and ragged ones dashed; latency is the median of the timed runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments import command, figures, kernel_plan
from experiments.columns import reference_block_size
from experiments.kernel_plan import COPY, Cell
from paged_jax.measure import results

if TYPE_CHECKING:  # matplotlib takes most of a second: only drawing pays for it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = dict[str, float]  # by metric
Bench = dict[Cell, Values]

NAMES = {
    "paged": "paged",
    "contiguous": "contiguous blocks",
    "jax": "JAX's paged kernel",
    "dense": "dense product",
    "torch": "PyTorch SDPA",
}
LOOKS = dict(zip(NAMES, figures.LINES, strict=False))
DASHES = {"full": "-", "ragged": "--"}


def draw(out: str | os.PathLike[str]) -> list[Path]:
    """Draws the figures of folder ``out`` into it; returns the paths of what it drew.

    Raises ``ValueError`` when the rows cannot be read or a factor is missing.
    """
    bench = read(out)
    from matplotlib import style

    paths = []
    with style.context(figures.STYLE, after_reset=True):
        for name, figure in figures_of(bench):
            paths.append(Path(out) / f"{name}.png")
            figure.savefig(paths[-1], dpi=200, metadata={"Software": None})
    return paths


def read(out: str | os.PathLike[str]) -> Bench:
    """Values of every cell of folder ``out``, the copy's included, in the order of its rows."""
    bench: Bench = {}
    kinds = [int if isinstance(value, int) else str for value in COPY]
    for row in results.read(out):
        try:
            fields = [kind(row[name]) for kind, name in zip(kinds, Cell._fields, strict=True)]
            cell = Cell._make(fields)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{Path(out) / results.ROWS}: {error}: not of this benchmark"
            ) from None
        bench.setdefault(cell, {})[row["metric"]] = row["value"]
    return bench


def text(bench: Bench) -> str:
    """A line for each cell: its time, its share of a copy's speed, and its time over baselines'."""
    lines = [
        [*Cell._fields, "us", "fastest", "GB/s", "of copy", "TFLOP/s", "x dense", "x contiguous"]
    ]
    for cell, values in bench.items():
        ratios = [
            f"{values['microseconds'] / bench[other]['microseconds']:.2f}" if other in bench else ""
            for other in (_dense(cell), cell._replace(contender="contiguous"))
        ]
        lines.append(
            [
                *map(str, cell),
                f"{values['microseconds']:.1f}",
                f"{values['fastest_microseconds']:.1f}",
                f"{values['gigabytes_per_second']:.1f}",
                f"{values['copy_fraction']:.3f}",
                f"{values['teraflops']:.3g}",
                *ratios,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def _dense(cell: Cell) -> Cell:
    none = kernel_plan.NONE
    return cell._replace(contender="dense", backend=none, splits=none, block_size=0)


def figures_of(bench: Bench) -> Iterator[tuple[str, Figure]]:
    """Figures by name; what a benchmark did not time, or did not vary, is left out."""
    for kernel in kernel_plan.KERNELS:
        part = {cell: values for cell, values in bench.items() if cell.kernel == kernel}
        sizes = sorted({cell.block_size for cell in part} - {0})
        if not sizes:
            continue
        shown = {0, reference_block_size(sizes)}
        chosen = {cell: part[cell] for cell in part if cell.block_size in shown}
        yield f"{kernel}_latency", _latency(chosen, f"{kernel}, blocks of {max(shown)} slots")
        if kernel == "decode" and len(sizes) > 1:
            yield "block_size", _block_size(part)


def _latency(bench: Bench, title: str) -> Figure:
    """Latency against the context, a panel for each number of rows."""
    figure, panels = _panels(sorted({cell.batch for cell in bench}))
    for batch, axes in panels.items():
        part = {cell: bench[cell] for cell in bench if cell.batch == batch}
        _lines(axes, part, "context")
        axes.set_title(f"{title}, {batch} row{'s' * (batch > 1)}")
        axes.set_xlabel("Context (tokens)")
    _legend(figure)
    return figure


def _block_size(bench: Bench) -> Figure:
    """Latency of the longest context against the block size, a panel for each number of rows."""
    longest = max(cell.context for cell in bench)
    figure, panels = _panels(sorted({cell.batch for cell in bench}))
    for batch, axes in panels.items():
        part = {
            cell: bench[cell]
            for cell in bench
            if cell.batch == batch and cell.context == longest and cell.block_size
        }
        _lines(axes, part, "block_size")
        axes.set_title(f"decode, context {longest}, {batch} row{'s' * (batch > 1)}")
        axes.set_xlabel("Block size (slots)")
    _legend(figure)
    return figure


def _lines(axes: Axes, bench: Bench, factor: str) -> None:
    """A line for every combination of the other factors."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    series: dict[Cell, dict[int, float]] = {}
    for cell, values in bench.items():
        key = Cell._make(0 if name == factor else value for name, value in cell._asdict().items())
        series.setdefault(key, {})[getattr(cell, factor)] = values["microseconds"]
    varied = [
        name
        for name in ("backend", "dtype", "splits")
        if len({getattr(cell, name) for cell in series} - {kernel_plan.NONE}) > 1
    ]
    for cell, points in series.items():
        color, marker = LOOKS[cell.contender]
        words = [NAMES[cell.contender], *(getattr(cell, name) for name in varied)]
        words += ["ragged"] if cell.lengths == "ragged" else []
        places = sorted(points)
        axes.plot(
            places,
            [points[place] for place in places],
            DASHES[cell.lengths],
            label=", ".join(word for word in words if word != kernel_plan.NONE),
            color=color,
            marker=marker,
            fillstyle="full" if cell.lengths == "full" else "none",
        )
    places = sorted({place for points in series.values() for place in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, map(str, places))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.minorticks_off()


def _panels(batches: list[int]) -> tuple[Figure, dict[int, Axes]]:
    from matplotlib.figure import Figure

    across = min(len(batches), figures.PANELS)
    down = -(-len(batches) // across)
    width = figures.COLUMN if across == 1 else figures.PAGE
    figure = Figure(figsize=(width, 2.8 * down), layout="constrained")
    grid = figure.subplots(down, across, sharey=True, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel("Latency of a call (µs)")
    for axes in grid.flat[len(batches) :]:
        axes.remove()
    return figure, dict(zip(batches, grid.flat, strict=False))


def _legend(figure: Figure) -> None:
    """What the axes show, each once, above them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    wide = figure.get_figwidth() > figures.COLUMN
    columns = 3 if wide else 2 if max(map(len, handles)) < 30 else 1
    # Labels fill columns from above; these are to be read row by row.
    labels = [label for first in range(columns) for label in list(handles)[first::columns]]
    shown = [handles[label] for label in labels]
    figure.legend(shown, labels, loc="outside upper center", ncols=columns)


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("out", None, "folder of a benchmark's results", required=True)


def main(_: list[str]) -> None:
    out = flags.FLAGS.out
    print(text(read(out)))
    for path in draw(out):
        print(path)


if __name__ == "__main__":
    command.run(main, define_flags)
