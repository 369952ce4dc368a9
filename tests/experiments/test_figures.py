"""Figures show the means and spreads of the rows, whatever the sweep varied."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from experiments import figures
from paged_jax.measure import results
from paged_jax.memory import allocators

ROOT = Path(__file__).resolve().parents[2]
FACTORS = ("workload", "allocator", "block_size", "sharing", "pool_slots", "seed")
SEGMENTS = ("token", "reserved", "internal", "round_up", "stranded", "short", "cached", "free")
METRICS = [
    *((f"{name}_fraction", "of pool") for name in SEGMENTS),
    ("sharing_saving", "of table entries"),
    ("running_mean", "sequences"),
    ("preemptions", "sequences"),
]
STUDENT_T_2 = 4.302652729911275  # 95 %, of 2 degrees of freedom
OTHERS = ("orca_max", "orca_pow2", "orca_oracle", "first_fit_max", "first_fit_oracle")
BARS = (*((name, "-") for name in OTHERS), ("paged", 16))
ALL = ["waste_breakdown.png", "block_size.png", "sharing.png", "running.png"]


def measured(cell: Sequence[Any]) -> dict[str, float]:
    """Values that depend on every factor; the segments sum to 1."""
    workload, allocator, size, sharing, pool_slots, seed = cell
    slots = 8 if size == "-" else int(size)
    token = 0.9 / (1 + slots / (100 + 10 * seed)) - 0.05 * len(allocator) + 0.01 * len(workload)
    rest = [0.4, 0.3, 0.2, 0.06, 0.03, 0.0, 0.01]
    fractions = [token, *((1 - token) * part for part in rest)]
    saving = 0.0 if size == "-" else float(sharing) * (0.5 + 0.01 * seed) / slots**0.1
    return {
        **dict(zip((f"{name}_fraction" for name in SEGMENTS), fractions, strict=True)),
        "sharing_saving": saving,
        "running_mean": 100 * token + seed + float(sharing) + int(pool_slots) / 1e4,
        "preemptions": 0,
    }


def sweep(
    out: Path,
    *,
    workloads: Sequence[str] = ("sharegpt", "alpaca"),
    names: Sequence[str] = tuple(reversed(figures.LOOKS)),
    sizes: Sequence[object] = (64, 1, 16),
    sharing: Sequence[str] = ("1.0", "0", "0.25"),
    pools: Sequence[int] = (15744,),
    seeds: Iterable[int] = range(3),
    metrics: Sequence[tuple[str, str]] = METRICS,
    factors: Sequence[str] = FACTORS,
    finished: int | None = None,
    **changes: float,
) -> Path:
    """A folder of results in which ``changes`` replace what was measured."""
    pairs = [(name, size) for name in names for size in (sizes if name == "paged" else "-")]
    cells = [
        (workload, *pair, share, pool, seed)
        for workload, pair, share, pool, seed in itertools.product(
            workloads, pairs, sharing, pools, seeds
        )
    ]
    table = results.Table.open(
        out, factors=factors, metrics=metrics, cells=cells, run={"flags": {}}
    )
    with table:
        for cell in cells[:finished]:
            values = measured(cell) | changes
            table.append(cell, {name: values[name] for name, _ in metrics})
    return out


def drawn(out: Path) -> dict[str, Figure]:
    """The figures of a folder as matplotlib's objects, by file name."""
    found: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(figure: Figure, path: Path, **options: Any) -> None:
        found[path.name] = figure
        save(figure, path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        paths = figures.draw(out)
    assert [path.name for path in paths] == list(found)
    assert all(path.parent == out and path.is_file() for path in paths)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep(tmp_path_factory.mktemp("sweep") / "out")


@pytest.fixture(scope="module")
def shown(folder: Path) -> dict[str, Figure]:
    return drawn(folder)


def mean(metric: str, *cell: object) -> float:
    return float(np.mean([measured((*cell, 15744, seed))[metric] for seed in range(3)]))


def half_width(metric: str, *cell: object) -> float:
    values = [measured((*cell, 15744, seed))[metric] for seed in range(3)]
    return float(STUDENT_T_2 * np.std(values, ddof=1) / np.sqrt(3))


def rectangles(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def check_line(line: Line2D, places: Sequence[float], fractions: Sequence[float]) -> None:
    np.testing.assert_array_equal(np.asarray(line.get_xdata(), float), places)
    np.testing.assert_allclose(
        np.asarray(line.get_ydata(), float), 100 * np.array(fractions, float)
    )


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_files_are_what_the_sweep_varied(shown: dict[str, Figure], folder: Path) -> None:
    assert list(shown) == ALL
    widths = {}
    for name in ALL:
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        widths[name] = int.from_bytes(data[16:20])
    assert widths == dict.fromkeys(ALL, 1400) | {"block_size.png": 680}


def test_stacks_are_means_in_per_cent_from_token_up(shown: dict[str, Figure]) -> None:
    for axes, workload in zip(
        shown["waste_breakdown.png"].axes, ("sharegpt", "alpaca"), strict=True
    ):
        assert axes.get_title() == workload
        names = [label.get_text() for label in axes.get_xticklabels()]
        assert names[1:5:2] == ["Orca (Pow2)", "First-fit (Max)"]
        assert names[5:] == ["Paged (block 16)"]
        labels = [text.get_text() for text in axes.texts]
        for place, pair in enumerate(BARS):
            stack = [bar for bar in rectangles(axes) if abs(bar.get_x() + 0.4 - place) < 0.1]
            heights = [
                100 * mean(f"{name}_fraction", workload, *pair, "0")
                for name in SEGMENTS
                if name != "cached"  # 0 everywhere: neither drawn nor in the legend
            ]
            np.testing.assert_allclose([bar.get_height() for bar in stack], heights)
            bottoms = np.cumsum([0, *heights[:-1]])
            np.testing.assert_allclose([bar.get_y() for bar in stack], bottoms, atol=1e-9)
            assert sum(heights) == pytest.approx(100)
            wanted = [f"{height:.1f}" for height in heights if height >= 4]
            assert labels[: len(wanted)] == wanted
            del labels[: len(wanted)]
        assert labels == []
    (legend,) = shown["waste_breakdown.png"].legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert texts == {name.replace("_", "-") for name in SEGMENTS} - {"cached"}


def test_block_sizes_have_a_line_a_band_and_the_best_of_the_others(
    shown: dict[str, Figure],
) -> None:
    (axes,) = shown["block_size.png"].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16", "64"]
    lines = iter(axes.lines)
    for workload, band in zip(("sharegpt", "alpaca"), axes.collections, strict=True):
        cells = [(workload, "paged", size, "0") for size in (1, 16, 64)]
        means = [mean("token_fraction", *cell) for cell in cells]
        widths = [half_width("token_fraction", *cell) for cell in cells]
        line = next(lines)
        assert line.get_label() == workload
        check_line(line, [1, 16, 64], means)
        corners = np.asarray(band.get_paths()[0].vertices, float)
        for size, middle, width in zip((1, 16, 64), means, widths, strict=True):
            ends = corners[corners[:, 0] == size, 1]
            np.testing.assert_allclose(ends.min(), 100 * (middle - width))
            np.testing.assert_allclose(ends.max(), 100 * (middle + width))
        best = max(mean("token_fraction", workload, name, "-", "0") for name in OTHERS)
        check_line(next(lines), [1, 64], [best, best])


def test_sharing_is_ordered_as_a_number(shown: dict[str, Figure]) -> None:
    for axes, workload in zip(shown["sharing.png"].axes, ("sharegpt", "alpaca"), strict=True):
        assert axes.get_ylim()[0] == 0
        for line, size in zip(axes.lines, (1, 16, 64), strict=True):
            assert line.get_label() == f"{size}-slot blocks"
            savings = [
                mean("sharing_saving", workload, "paged", size, share)
                for share in ("0", "0.25", "1.0")
            ]
            check_line(line, [0, 0.25, 1], savings)
            assert 100 * max(savings) <= axes.get_ylim()[1]  # one panel must not cut another's


def test_running_bars_carry_their_value_and_interval(shown: dict[str, Figure]) -> None:
    for axes, workload in zip(shown["running.png"].axes, ("sharegpt", "alpaca"), strict=True):
        cells = [(workload, *pair, "0") for pair in BARS]
        means = [mean("running_mean", *cell) for cell in cells]
        np.testing.assert_allclose([bar.get_height() for bar in rectangles(axes)], means)
        assert [text.get_text() for text in axes.texts] == [f"{value:.1f}" for value in means]
        for cell, middle, bar in zip(cells, means, axes.collections, strict=True):
            assert isinstance(bar, LineCollection)
            low, high = bar.get_segments()[0][:, 1]
            width = half_width("running_mean", *cell)
            np.testing.assert_allclose([low, high], [middle - width, middle + width])


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of labels, titles and legend entries that cover each other, in the saved figure."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        texts += [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
        if not any(label.get_rotation() for label in axes.get_xticklabels()):
            texts += axes.get_xticklabels()  # the boxes of turned ones overlap, they do not
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()
    ]
    return [
        (first, second)
        for (first, one), (second, other) in itertools.combinations(boxes, 2)
        if one.overlaps(other)
    ]


@pytest.mark.parametrize("name", ALL)
def test_no_text_covers_another(shown: dict[str, Figure], name: str) -> None:
    assert overlaps(shown[name]) == []


def test_text_that_covers_another_is_found() -> None:
    figure = Figure()
    axes = figure.subplots()
    axes.text(0.5, 0.5, "under")
    axes.text(0.51, 0.51, "over")
    assert overlaps(figure) == [("under", "over")]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"workloads": ["uniform"], "sharing": ["0.5"]}, ["waste_breakdown", "block_size"]),
        ({"names": ["orca_max"]}, ["waste_breakdown"]),
        ({"names": ["paged"], "sizes": [8], "seeds": [3]}, ["waste_breakdown", "sharing"]),
        ({"names": ["paged"], "finished": 8}, ["waste_breakdown", "sharing"]),
        (
            {"names": ["paged", "orca_max"], "finished": 39},
            ["waste_breakdown", "block_size", "sharing"],
        ),
    ],
    ids=["one workload", "no paging", "one seed", "one block size", "half a workload"],
)
def test_figure_that_would_show_nothing_is_left_out(
    tmp_path: Path, changes: dict[str, Any], names: list[str]
) -> None:
    shown = drawn(sweep(tmp_path, **changes))
    assert list(shown) == [f"{name}.png" for name in (*names, "running")]
    assert {path.name for path in tmp_path.glob("*.png")} == set(shown)
    for figure in shown.values():
        assert overlaps(figure) == []
        entries = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
        labels = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
        assert sorted(entries) == sorted(labels)
    has_intervals = any(axes.collections for axes in shown["running.png"].axes)
    assert has_intervals == ("seeds" not in changes)


def test_pool_sizes_have_figures_of_their_own(tmp_path: Path) -> None:
    shown = drawn(sweep(tmp_path, sizes=[16], sharing=["0"], pools=[4096, 64]))
    assert list(shown) == [
        f"{name}_pool{pool}.png" for pool in (64, 4096) for name in ("waste_breakdown", "running")
    ]
    small, large = (rectangles(shown[f"running_pool{pool}.png"].axes[0])[0] for pool in (64, 4096))
    assert large.get_height() - small.get_height() == pytest.approx((4096 - 64) / 1e4)


def test_sweep_without_blocks_of_16_shows_the_median(tmp_path: Path) -> None:
    shown = drawn(sweep(tmp_path, names=["paged"], sizes=[64, 2, 8], sharing=["0"], seeds=[0]))
    (label,) = shown["waste_breakdown.png"].axes[0].get_xticklabels()
    assert label.get_text() == "Paged (block 8)"


def test_equal_rows_give_equal_files(folder: Path, shown: dict[str, Figure]) -> None:
    before = {name: (folder / name).read_bytes() for name in shown}
    with matplotlib.rc_context({"font.size": 20, "lines.linewidth": 9, "axes.grid": True}):
        settings = dict(matplotlib.rcParams)
        figures.draw(folder)
        assert dict(matplotlib.rcParams) == settings
    assert {name: (folder / name).read_bytes() for name in shown} == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": METRICS[1:]}, "metric token_fraction is missing"),
        ({"factors": ("workload", "allocator", "size", *FACTORS[3:])}, "column block_size is miss"),
        ({"finished": 0}, "holds no cells yet"),
        ({"running_mean": float("nan")}, "expected finite values of running_mean, got [nan, nan"),
        ({"names": ["slab"]}, "expected allocators of ['orca_max',"),
        ({"factors": ("sharing", *FACTORS[1:3], "workload", *FACTORS[4:])}, "to float: 'sharegpt'"),
    ],
)
def test_wrong_rows_raise_in_one_line_and_draw_nothing(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    sweep(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"rows\.csv") as error:
        figures.draw(tmp_path)
    assert message in one_line(error)
    assert list(tmp_path.glob("*.png")) == []


def test_every_allocator_has_its_look() -> None:
    assert list(figures.LOOKS) == list(allocators.ALLOCATORS)


def test_import_loads_no_matplotlib_and_drawing_no_pyplot(folder: Path) -> None:
    code = (
        "import sys; from experiments import figures\n"
        "assert 'matplotlib' not in sys.modules and 'jax' not in sys.modules\n"
        "figures.draw(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_command_prints_what_it_drew(folder: Path, tmp_path: Path) -> None:
    done, failed = (
        subprocess.run(
            [sys.executable, "-m", "experiments.figures", f"--out={out}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for out in (folder, tmp_path)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [str(folder / name) for name in ALL]
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith(f"error: {tmp_path}/run.json is missing")
