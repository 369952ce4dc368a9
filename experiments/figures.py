"""What does a sweep show? Its figures, drawn from the rows of its folder and nothing else.

    python -m experiments.figures --out=results/sweep

waste_breakdown.png  what the slots of the pool hold (Fig. 2 of Kwon et al., SOSP 2023)
block_size.png       what a larger block costs
sharing.png          what sharing saves (Fig. 15)
running.png          how many sequences run at a time (Fig. 13)

All but ``sharing.png`` show the smallest sharing ratio. Bars show paging at blocks of 16 slots,
or at the median block size of a sweep without them. A figure whose factor does not vary is left
out; several pool sizes give one file each. Error bars and bands are 95 % confidence intervals
over the seeds. Equal rows give equal files, whatever matplotlibrc says.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from experiments import command
from experiments.columns import NO_BLOCKS, reference_block_size
from paged_jax.measure import results, statistics

if TYPE_CHECKING:  # matplotlib takes most of a second: only drawing pays for it
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.4, 7.0  # inches across, of a paper in two columns
PANELS = 3  # side by side at most

# The colours of Okabe and Ito, which all kinds of colour vision tell apart. Hatches and markers
# tell them apart in grey.
BLUE, SKY, GREEN, YELLOW = "#0072B2", "#56B4E9", "#009E73", "#F0E442"
ORANGE, VERMILION, PURPLE = "#E69F00", "#D55E00", "#CC79A7"
SEGMENTS = (
    ("token", BLUE, ""),
    ("reserved", SKY, "////"),
    ("internal", ORANGE, "\\\\\\\\"),
    ("round_up", VERMILION, "xxxx"),
    ("stranded", PURPLE, "...."),
    ("short", YELLOW, "----"),
    ("cached", GREEN, "||||"),
    ("free", "white", ""),
)
LOOKS = {
    "orca_max": ("Orca (Max)", SKY, ""),
    "orca_pow2": ("Orca (Pow2)", SKY, "////"),
    "orca_oracle": ("Orca (Oracle)", SKY, "xxxx"),
    "first_fit_max": ("First-fit (Max)", ORANGE, "...."),
    "first_fit_oracle": ("First-fit (Oracle)", ORANGE, "++++"),
    "paged": ("Paged", BLUE, ""),
}
LINES = tuple(zip((BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "black"), "os^DvPX", strict=True))
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.4}
INTERVAL: dict[str, Any] = {"ecolor": "black", "elinewidth": 0.7, "capsize": 1.5}
METRICS = (*(f"{name}_fraction" for name, *_ in SEGMENTS), "sharing_saving", "running_mean")
STYLE = {
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.4,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
}


class Cell(NamedTuple):
    """The factors of an observation but its seed."""

    workload: str
    allocator: str
    block_size: int  # slots; 0 for an allocator that has no blocks
    sharing: float
    pool_slots: int


Summaries = Mapping[str, statistics.Summary]  # by metric
Sweep = dict[Cell, Summaries]
Look = tuple[str, str, str]  # label, colour, hatch


def draw(out: str | os.PathLike[str]) -> list[Path]:
    """Draws the figures of folder ``out`` into it; returns the paths of what it drew.

    Raises ``ValueError``, before anything is written, when the rows cannot be read or are none,
    or when a factor or a metric that figures need is missing or no number.
    """
    sweep = _summarize(results.read(out), Path(out) / results.ROWS)
    from matplotlib import style

    paths = []
    pools = sorted({cell.pool_slots for cell in sweep})
    with style.context(STYLE, after_reset=True):
        for pool in pools:
            part = {cell: summaries for cell, summaries in sweep.items() if cell.pool_slots == pool}
            suffix = f"_pool{pool}" if len(pools) > 1 else ""
            for name, figure in _figures(part):
                paths.append(Path(out) / f"{name}{suffix}.png")
                figure.savefig(paths[-1], dpi=200, metadata={"Software": None})
    return paths


def _summarize(rows: Iterable[Mapping[str, Any]], path: Path) -> Sweep:
    """Means and spreads over the seeds, in the order of the rows."""
    repeats: dict[Cell, dict[str, list[float]]] = {}
    for row in rows:
        cell = repeats.setdefault(_cell(row, path), collections.defaultdict(list))
        cell[row["metric"]].append(row["value"])
    if not repeats:
        raise ValueError(f"{path} holds no cells yet: there is nothing to draw")
    for cell in repeats.values():
        for metric in METRICS:
            if metric not in cell:
                raise ValueError(f"{path}: metric {metric} is missing, figures need it")
            if not all(map(math.isfinite, cell[metric])):
                raise ValueError(f"{path}: expected finite values of {metric}, got {cell[metric]}")
    return {
        cell: {metric: statistics.summarize(values[metric]) for metric in METRICS}
        for cell, values in repeats.items()
    }


def _cell(row: Mapping[str, Any], path: Path) -> Cell:
    try:
        allocator = row["allocator"]
        if allocator not in LOOKS:
            raise ValueError(f"expected allocators of {list(LOOKS)}, got {allocator!r}")
        return Cell(
            row["workload"],
            allocator,
            0 if row["block_size"] == NO_BLOCKS else int(row["block_size"]),
            float(row["sharing"]),
            int(row["pool_slots"]),
        )
    except KeyError as error:
        raise ValueError(f"{path}: column {error.args[0]} is missing, figures need it") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _figures(sweep: Sweep) -> Iterator[tuple[str, Figure]]:
    lowest = min(cell.sharing for cell in sweep)
    unshared = {cell: sweep[cell] for cell in sweep if cell.sharing == lowest}
    sizes = {0, _reference(unshared)}
    bars = {cell: unshared[cell] for cell in unshared if cell.block_size in sizes}
    yield "waste_breakdown", _waste_breakdown(bars)
    if len(_block_sizes(unshared)) > 1:
        yield "block_size", _block_size(unshared)
    if len({cell.sharing for cell in sweep if cell.block_size}) > 1:
        yield "sharing", _sharing(sweep)
    yield "running", _running(bars)


def _waste_breakdown(sweep: Sweep) -> Figure:
    """The pool's slots by category, a stack for each allocator and a panel for each workload."""
    figure, panels = _panels(_workloads(sweep), 3.0, "Slots of the pool (%)")
    segments = [
        segment
        for segment in SEGMENTS
        if any(summaries[f"{segment[0]}_fraction"].mean >= 5e-4 for summaries in sweep.values())
    ]
    for workload, axes in panels.items():
        cells = _ordered(sweep, workload)
        for place, cell in enumerate(cells):
            _stack(axes, place, sweep[cell], segments)
        names = [_look(cell)[0] for cell in cells]
        axes.set_xticks(range(len(cells)), names, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_ylim(0, 100)
        _set_width(axes, len(cells))
    _legend(figure, columns=4 if len(panels) == 1 else 8)
    return figure


def _stack(axes: Axes, place: int, summaries: Summaries, segments: Iterable[Look]) -> None:
    bottom = 0.0
    for name, color, hatch in segments:
        percent = 100 * summaries[f"{name}_fraction"].mean
        bar = _bar(axes, place, percent, (name.replace("_", "-"), color, hatch), bottom=bottom)
        bottom += percent
        if percent < 4:  # lower than a digit
            continue
        axes.bar_label(
            bar,
            fmt="%.1f",
            label_type="center",
            size=6,
            color="white" if color == BLUE else "black",
            bbox={"facecolor": color, "edgecolor": "none", "pad": 0.5},  # no hatch behind it
            clip_path=bar.patches[0],
        )
    token = summaries["token_fraction"]
    # On the edge, where it covers no label. A single seed's nan draws nothing.
    axes.errorbar(place + 0.4, 100 * token.mean, 100 * token.half_width, zorder=4, **INTERVAL)


def _block_size(sweep: Sweep) -> Figure:
    """Slots that hold a token against the block size, a line for each workload."""
    figure, panels = _panels([""], 2.5, "Slots of the pool that hold a token (%)")
    axes = panels[""]
    sizes = _block_sizes(sweep)
    for workload, (color, marker) in zip(_workloads(sweep), itertools.cycle(LINES), strict=False):
        cells = [cell for cell in sweep if cell.workload == workload]
        paged = {
            cell.block_size: sweep[cell]["token_fraction"] for cell in cells if cell.block_size
        }
        _line(axes, paged, label=workload, color=color, marker=marker)
        others = [sweep[cell]["token_fraction"].mean for cell in cells if not cell.block_size]
        if others:
            ends, level = (sizes[0], sizes[-1]), 100 * max(others)
            axes.plot(ends, (level, level), ":", color=color, marker=marker, mfc="none")
    if not all(cell.block_size for cell in sweep):
        axes.plot([], [], ":", color="black", label="best without paging")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.minorticks_off()
    axes.set_xlabel("Block size (slots)")
    _legend(figure, columns=4)
    return figure


def _sharing(sweep: Sweep) -> Figure:
    """Block-table entries that need no block of their own, against the sharing ratio.

    Only paging shares: the other allocators save nothing by definition.
    """
    from matplotlib.ticker import FixedLocator

    figure, panels = _panels(_workloads(sweep), 2.3, "Memory saved (% of table entries)")
    sizes = _block_sizes(sweep)
    sizes = sorted({sizes[0], _reference(sweep), sizes[-1]})
    ratios = sorted({cell.sharing for cell in sweep})
    for workload, axes in panels.items():
        for size, (color, marker) in zip(sizes, LINES, strict=False):
            savings = {
                cell.sharing: sweep[cell]["sharing_saving"]
                for cell in sweep
                if cell.workload == workload and cell.block_size == size
            }
            _line(axes, savings, label=f"{size}-slot blocks", color=color, marker=marker)
        axes.set_xlabel("Sharing ratio")
        axes.xaxis.set_major_locator(FixedLocator(ratios, nbins=6))
    axes.set_ylim(bottom=0)  # of all panels, and only now: it ends their common autoscale
    _legend(figure, columns=3)
    return figure


def _running(sweep: Sweep) -> Figure:
    """Mean number of running sequences, a bar for each allocator and a panel for each workload."""
    figure, panels = _panels(_workloads(sweep), 2.2, "Running sequences (mean)", sharey=False)
    for workload, axes in panels.items():
        cells = _ordered(sweep, workload)
        for place, cell in enumerate(cells):
            running = sweep[cell]["running_mean"]
            interval = None if running.count == 1 else running.half_width
            bar = _bar(axes, place, running.mean, _look(cell), yerr=interval, error_kw=INTERVAL)
            axes.bar_label(bar, fmt="%.1f", padding=1, size=6)
        axes.margins(y=0.1)
        axes.set_xticks([])
        _set_width(axes, len(cells))
    _legend(figure, columns=3 if len(panels) == 1 else 6)
    return figure


def _panels(
    titles: list[str], height: float, ylabel: str, *, sharey: bool = True
) -> tuple[Figure, dict[str, Axes]]:
    """A figure, and its axes by title; ``height`` is that of a row of axes, in inches."""
    from matplotlib.figure import Figure

    rows, columns = math.ceil(len(titles) / PANELS), min(len(titles), PANELS)
    size = COLUMN if len(titles) == 1 else PAGE, height * rows
    figure = Figure(figsize=size, layout="constrained")  # without pyplot, so without its state
    grid = figure.subplots(rows, columns, sharey=sharey, squeeze=False)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    for axes in grid.flat[len(titles) :]:
        axes.remove()
    panels = dict(zip(titles, grid.flat, strict=False))
    for title, axes in panels.items():
        axes.set_title(title)
    return figure, panels


def _set_width(axes: Axes, bars: int) -> None:
    middle, half_width = (bars - 1) / 2, max(bars, 3) / 2 + 0.1  # a lone bar is no wall
    axes.set_xlim(middle - half_width, middle + half_width)
    axes.tick_params(axis="x", length=0)


def _bar(axes: Axes, place: float, height: float, look: Look, **options: Any) -> BarContainer:
    label, color, hatch = look
    return axes.bar(place, height, label=label, color=color, hatch=hatch, **EDGE, **options)


def _line(axes: Axes, points: Mapping[Any, statistics.Summary], *, color: str, **look: Any) -> None:
    """Fractions in per cent with their band; points come in any order."""
    places = sorted(points)
    summaries = [points[place] for place in places]
    low = [100 * (summary.mean - summary.half_width) for summary in summaries]
    high = [100 * (summary.mean + summary.half_width) for summary in summaries]
    axes.fill_between(places, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(places, [100 * summary.mean for summary in summaries], color=color, **look)


def _legend(figure: Figure, columns: int) -> None:
    """What the axes show, each once and row by row, above them."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    labels = [label for first in range(columns) for label in list(handles)[first::columns]]
    chosen = [handles[label] for label in labels]
    figure.legend(chosen, labels, loc="outside upper center", ncols=columns)


def _workloads(sweep: Sweep) -> list[str]:
    return list(dict.fromkeys(cell.workload for cell in sweep))


def _ordered(sweep: Sweep, workload: str) -> list[Cell]:
    """The cells of a workload as ``LOOKS`` lists them."""
    cells = [cell for cell in sweep if cell.workload == workload]
    return sorted(cells, key=lambda cell: list(LOOKS).index(cell.allocator))


def _block_sizes(sweep: Sweep) -> list[int]:
    return sorted({cell.block_size for cell in sweep if cell.block_size})


def _reference(sweep: Sweep) -> int:
    """The block size that stands for paging; 0 in a sweep without paging."""
    return reference_block_size(_block_sizes(sweep) or [0])


def _look(cell: Cell) -> tuple[str, str, str]:
    name, color, hatch = LOOKS[cell.allocator]
    return f"{name} (block {cell.block_size})" if cell.block_size else name, color, hatch


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("out", None, "folder of a sweep's results", required=True)


def main(_: list[str]) -> None:
    for path in draw(flags.FLAGS.out):
        print(path)


if __name__ == "__main__":
    command.run(main, define_flags)
