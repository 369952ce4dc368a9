"""The table that a sweep prints: means and 95 % half-widths over seeds, from its rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.columns import NO_BLOCKS, reference_block_size
from paged_jax.measure import statistics

# Metric, heading, factor, decimals.
_WASTE = (
    ("token_fraction", "token %", 100, 2),
    ("reserved_fraction", "reserved %", 100, 2),
    ("internal_fraction", "internal %", 100, 2),
    ("external_fraction", "external %", 100, 2),
    ("fragmented_fraction", "fragmented %", 100, 2),
    ("running_mean", "running", 1, 2),
    ("sharing_saving", "saved %", 100, 2),
    ("preemptions", "preemptions", 1, 0),
    ("finished", "finished", 1, 0),
)
_SHARING = (
    ("token_fraction", "token %", 100, 2),
    ("sharing_saving", "saved of entries %", 100, 2),
    ("saved_fraction", "saved of pool %", 100, 2),
    ("running_mean", "running", 1, 2),
    ("copies", "copies", 1, 0),
)

Metrics = dict[str, list[float]]  # one value a seed
Cells = dict[tuple[str, ...], Metrics]  # by the words of a line's label


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Waste per allocator at the least sharing, what paging reclaims, what sharing saves."""
    panels: dict[tuple[str, str], dict[float, Cells]] = {}
    for row in rows:
        panel = panels.setdefault((row["workload"], row["pool_slots"]), {})
        cells = panel.setdefault(float(row["sharing"]), {})
        metrics = cells.setdefault((row["allocator"], row["block_size"]), {})
        metrics.setdefault(row["metric"], []).append(row["value"])
    return "\n".join(
        part
        for (workload, pool_slots), panel in panels.items()
        for part in _panel(f"{workload}, pool of {int(pool_slots):,} slots", panel)
    )


def _panel(title: str, panel: dict[float, Cells]) -> Iterator[str]:
    least = min(panel)
    cut = statistics.summarize(next(iter(panel[least].values()))["cut"]).mean
    yield f"{title}, sharing {least:g}, {100 * cut:.2f} % of requests cut to the longest length"
    yield _table(_WASTE, panel[least])
    for name in dict.fromkeys(name for name, size in panel[least] if size != NO_BLOCKS):
        size = str(
            reference_block_size([int(size) for other, size in panel[least] if other == name])
        )
        if reclaimed := _reclaimed(panel[least][name, size]):
            yield f"waste reclaimed by {name} {size}, of that of {reclaimed}\n"
        if len(panel) > 1:
            by_sharing: Cells = {
                (f"{sharing:g}",): cells[name, size] for sharing, cells in sorted(panel.items())
            }
            yield f"{title}, {name} {size} by sharing\n{_table(_SHARING, by_sharing)}"


def _table(columns: Sequence[tuple[str, str, int, int]], cells: Cells) -> str:
    lines = [["", *(heading for _, heading, _, _ in columns)]]
    for words, metrics in cells.items():
        values = [_spread(metrics[name], scale, digits) for name, _, scale, digits in columns]
        lines.append([" ".join(word for word in words if word != NO_BLOCKS), *values])
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  ".join([label.ljust(first), *map(str.rjust, values, widths)]).rstrip() + "\n"
        for label, *values in lines
    )


def _spread(values: Sequence[float], scale: int, decimals: int) -> str:
    return statistics.summarize([scale * value for value in values]).text(decimals)


def _reclaimed(metrics: Metrics) -> str:
    prefix = "reclaimed_fraction_"
    return ", ".join(
        f"{name.removeprefix(prefix)}: {_spread(values, 100, 1)} %"
        for name, values in metrics.items()
        if name.startswith(prefix)
    )
