"""What does a run of ``experiments.serve`` show? Figures from the files of its folder alone.

    python -m experiments.serve_figures --out=results/serve

latency.png          normalised latency against the rate (Figure 12 of Kwon et al., SOSP 2023)
timeline_RATE.png    requests that run and wait, and the pool's use, over time
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from experiments import command, serve_output
from experiments.figures import BLUE, COLUMN, ORANGE, STYLE, VERMILION
from paged_jax.measure import results

if TYPE_CHECKING:  # matplotlib takes most of a second: only drawing pays for it
    from matplotlib.figure import Figure

LATENCY = (("mean", BLUE, "-o"), ("p50", ORANGE, "--s"), ("p99", VERMILION, ":^"))


def draw(out: str | os.PathLike[str]) -> list[Path]:
    """Draws the figures of folder ``out`` into it; returns their paths.

    Latency against the rate needs two rates. Raises ``ValueError`` for files that cannot be read.
    """
    latency = _latency(Path(out))
    timelines = _timelines(Path(out) / serve_output.STEPS)
    from matplotlib import style

    figures = {}
    with style.context(STYLE, after_reset=True):
        if len(latency["mean"]) > 1:
            figures["latency"] = _draw_latency(latency)
        for rate, series in timelines.items():
            figures[f"timeline_{rate}"] = _draw_timeline(series)
        for name, figure in figures.items():
            figure.savefig(Path(out) / f"{name}.png", dpi=200, metadata={"Software": None})
    return [Path(out) / f"{name}.png" for name in figures]


def _latency(out: Path) -> dict[str, dict[float, float]]:
    """Seconds a token by statistic and rate, for rates that are numbers."""
    found: dict[str, dict[float, float]] = {name: {} for name, *_ in LATENCY}
    for row in results.read(out):
        _, _, statistic = row["metric"].partition("normalised_latency_")
        if statistic in found and row["rate"][0].isdigit():
            found[statistic][float(row["rate"])] = row["value"]
    return found


def _timelines(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """The columns of each rate's steps."""
    found: dict[str, dict[str, list[float]]] = {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != serve_output.STEP_COLUMNS:
            raise ValueError(f"{path} line 1: expected {','.join(serve_output.STEP_COLUMNS)}")
        for row in reader:
            series = found.setdefault(row.pop("rate"), {name: [] for name in row})
            for name, text in row.items():
                series[name].append(float(text))
    return {
        rate: {name: np.array(column) for name, column in series.items()}
        for rate, series in found.items()
    }


def _draw_latency(latency: Mapping[str, Mapping[float, float]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMN, 2.3), layout="constrained")
    axes = figure.subplots()
    for statistic, color, form in LATENCY:
        points = sorted(latency[statistic].items())
        axes.plot(*zip(*points, strict=True), form, color=color, label=statistic)
    axes.set_xlabel("Requests a second")
    axes.set_ylabel("Normalised latency (s/token)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


def _draw_timeline(series: Mapping[str, np.ndarray]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(COLUMN, 3.0), layout="constrained")
    counts, pool = figure.subplots(2, 1, sharex=True)
    seconds = series["seconds"]
    counts.step(seconds, series["running"], color=BLUE, label="running", linewidth=0.8)
    counts.step(seconds, series["waiting"], color=VERMILION, label="waiting", linewidth=0.8)
    counts.set_ylabel("Requests")
    counts.set_ylim(bottom=0)
    counts.legend()
    pool.step(seconds, 100 * series["used_fraction"], color=ORANGE, label="held", linewidth=0.8)
    pool.step(seconds, 100 * series["token_fraction"], color=BLUE, label="tokens", linewidth=0.8)
    pool.set_ylabel("Slots of the pool (%)")
    pool.set_ylim(0, 100)
    pool.set_xlabel("Time (s)")
    pool.legend()
    return figure


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("out", None, "folder of the results of experiments.serve", required=True)


def main(_: list[str]) -> None:
    for path in draw(flags.FLAGS.out):
        print(path)


if __name__ == "__main__":
    command.run(main, define_flags)
