"""Cells of a sweep: one run of the simulator each, and the metrics it reports.

Cells with the same workload, sharing, pool and seed are a group: they see the very same requests
(common random numbers), and an allocator's gain over a baseline is taken within its group.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np

from paged_jax.config import Bounds, PoolConfig
from paged_jax.measure import progress, results
from paged_jax.memory import ledger
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import Requests, Trace, Workload, arrays, arrivals, draw, replay

FACTORS = ("workload", "allocator", "block_size", "sharing", "pool_slots", "seed")
NO_BLOCKS = "-"
BASELINES = tuple(name for name, scheme in ALLOCATORS.items() if not scheme.has_blocks)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a set of cells has in common."""

    workload: str
    sharing: float
    pool_slots: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A sweep: its factors, and how long every cell runs."""

    workloads: dict[str, Workload]
    allocators: tuple[str, ...]
    block_sizes: tuple[int, ...]
    sharing: tuple[float, ...]
    pool_slots: tuple[int, ...]
    seeds: int
    steps: int
    warmup_steps: int
    watermark: float = 0.0
    max_rows: int = 2**30
    replayed: Trace | None = None  # the workload "trace" in its own order, with its own arrivals
    step_seconds: float | None = None

    def groups(self) -> list[Group]:
        """All groups, in the order of their rows."""
        return [
            Group(workload=workload, sharing=sharing, pool_slots=pool_slots, seed=seed)
            for workload in self.workloads
            for pool_slots in self.pool_slots
            for sharing in self.sharing
            for seed in range(self.seeds)
        ]

    def columns(self) -> list[tuple[str, int | str]]:
        """Allocator and block size of each cell of a group."""
        return [
            (allocator, block_size)
            for allocator in self.allocators
            for block_size in (
                self.block_sizes if ALLOCATORS[allocator].has_blocks else (NO_BLOCKS,)
            )
        ]

    def cells(self) -> Iterator[tuple]:
        """All cells, as values of ``FACTORS``."""
        for group in self.groups():
            for allocator, block_size in self.columns():
                yield cell_of(group, allocator, block_size)

    def metrics(self) -> list[tuple[str, str]]:
        """Names and units of what every cell reports."""
        fractions = (*ledger.CATEGORIES, "external", "fragmented", "saved")
        return [
            *((f"{name}_fraction", "of pool") for name in fractions),
            ("sharing_saving", "of table entries"),
            ("running_mean", "sequences"),
            ("requests_mean", "requests"),
            ("preemptions", "requests"),
            ("copies", "copies"),
            ("finished", "requests"),
            ("cut", "of requests"),
            ("steps", "steps"),
            *(
                (f"reclaimed_fraction_{name}", f"of the waste of {name}")
                for name in self.allocators
                if name in BASELINES
            ),
        ]


def cell_of(group: Group, allocator: str, block_size: int | str) -> tuple:
    """A cell as values of ``FACTORS``."""
    return (
        group.workload,
        allocator,
        block_size,
        group.sharing,
        group.pool_slots,
        group.seed,
    )


def requests_of(settings: Settings, group: Group, count: int) -> Requests:
    """The first ``count`` requests of a group, or the whole of a replayed trace."""
    workload = dataclasses.replace(settings.workloads[group.workload], sharing=group.sharing)
    if settings.replayed is None:
        return draw(workload, group.seed, count)
    return replay(
        settings.replayed, step_seconds=settings.step_seconds, max_length=workload.max_length
    )


def count_needed(settings: Settings, group: Group) -> int:
    """Requests that a run can hardly use up.

    A request holds at least its own prompt and half its output while it runs, so a full pool gets
    through about slots * steps / E[output * (prompt + output / 2)] of them; a third on top.
    """
    workload = dataclasses.replace(
        settings.workloads[group.workload], sharing=0.0, arrivals=arrivals.Saturated()
    )
    probe = draw(workload, seed=0, count=4_096)
    output_RF = probe.output_RF.astype(np.float64)
    held_R = (output_RF * (probe.prompt_R[:, None] / probe.samples + output_RF / 2)).sum(axis=1)
    at_once = group.pool_slots / (probe.prompt_R + output_RF.sum(axis=1) / 2).mean()
    steps = settings.warmup_steps + settings.steps
    needed = 4 / 3 * (group.pool_slots * steps / held_R.mean() + at_once)
    # Requests a step, where the arrivals have a rate.
    rate = getattr(settings.workloads[group.workload].arrivals, "rate", math.inf)
    return math.ceil(min(needed, 4 / 3 * rate * steps + 100))


def bounds_of(settings: Settings) -> Bounds:
    """Array sizes with which one program of each kind serves the whole sweep."""
    one_each = {(group.workload, group.pool_slots): group for group in settings.groups()}
    firsts = [
        requests_of(settings, group, count_needed(settings, group)) for group in one_each.values()
    ]
    return Bounds(
        requests=_power_of_two(max(first.count for first in firsts)),
        output=_power_of_two(max(int(first.output_RF.max()) for first in firsts)),
        blocks=max(max(settings.pool_slots) // min(settings.block_sizes), 1),
        block_size=max(settings.block_sizes),
        slots=max(settings.pool_slots),
    )


class Source:
    """The requests of a group, on the host and on the device; more of them when they run out.

    The first requests are the same however many there are, so a run that did not need more would
    have given the same results with them.
    """

    def __init__(self, settings: Settings, group: Group, bounds: Bounds) -> None:
        self.settings, self.group = settings, group
        self.first_count = count_needed(settings, group)
        self._load(self.first_count, bounds)

    def extend(self) -> None:
        """Twice as many requests."""
        self._load(2 * self.requests.count, self.bounds)

    def cut(self) -> float:
        """Fraction of requests that the longest length cut short."""
        return float(self.requests.cut_R[: self.first_count].mean())

    def _load(self, count: int, bounds: Bounds) -> None:
        self.requests = requests_of(self.settings, self.group, count)
        self.bounds = dataclasses.replace(
            bounds,
            requests=max(bounds.requests, _power_of_two(self.requests.count)),
            output=max(bounds.output, _power_of_two(int(self.requests.output_RF.max()))),
        )
        with simulator.on_cpu():
            self.work = arrays.put(self.requests, self.bounds.requests)


def run(settings: Settings, table: results.Table) -> None:
    """Runs all cells that ``table`` lacks: a group a thread, as each run is one native loop."""
    groups = settings.groups()
    bounds = bounds_of(settings)

    def work(group: Group) -> None:
        group_cells = {cell_of(group, *column) for column in settings.columns()}
        wanted = {cell for cell in group_cells if cell not in table}
        for cell, values in run_group(settings, group, wanted, bounds):
            table.append(cell, values)
            bar.advance()

    planned = len(groups) * len(settings.columns())
    with (
        progress.Progress(planned, "cells", done=len(table)) as bar,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        futures = [pool.submit(work, group) for group in groups]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def run_group(
    settings: Settings, group: Group, wanted: set[tuple], bounds: Bounds
) -> Iterator[tuple[tuple, dict[str, float]]]:
    """The ``wanted`` cells of a group, each with the values of its metrics.

    Baselines run first, wanted or not: all cells are measured against them.
    """
    if not wanted:
        return
    source = Source(settings, group, bounds)
    baselines = {
        column: _simulate(source, column) for column in settings.columns() if column[0] in BASELINES
    }
    waste = {
        name: 1 - result.mean("token") / group.pool_slots for (name, _), result in baselines.items()
    }
    for column in settings.columns():
        cell = cell_of(group, *column)
        if cell in wanted:
            result = baselines.get(column) or _simulate(source, column)
            yield cell, _measure(result, group.pool_slots, column[1], source.cut(), waste)


def _simulate(source: Source, column: tuple[str, int | str]) -> simulator.Result:
    """One cell, with as many requests as it takes for none to be lacking."""
    settings, group, (name, block_size) = source.settings, source.group, column
    config = PoolConfig(
        pool_slots=group.pool_slots,
        block_size=block_size if isinstance(block_size, int) else 1,
        max_length=settings.workloads[group.workload].max_length,
    )
    limits = policy.limits(
        rows=settings.max_rows,
        blocks=max(config.blocks, 1),
        watermark=settings.watermark if ALLOCATORS[name].has_blocks else 0.0,
    )
    while True:
        try:
            result = simulator.simulate(
                source.requests,
                ALLOCATORS[name],
                config,
                steps=settings.steps,
                warmup_steps=settings.warmup_steps,
                limits=limits,
                bounds=source.bounds,
                work=source.work,
            )
        except simulator.NeverFitsError as error:
            raise ValueError(
                f"{group.workload}, {name}, seed {group.seed}: {error}: raise --pool_slots, cut"
                " requests by --max_length, or leave the allocator out"
            ) from None
        if result.exhausted and settings.replayed is None:
            source.extend()
        elif result.steps == 0:
            raise ValueError(
                f"warmup_steps: {group.workload} is over before {settings.warmup_steps} steps"
            )
        else:
            return result


def _measure(
    result: simulator.Result,
    pool_slots: int,
    block_size: int | str,
    cut: float,
    waste: dict[str, float],
) -> dict[str, float]:
    sums, slot_steps = result.sums, result.steps * pool_slots
    fraction = {name: sums[name] / slot_steps for name in ledger.CATEGORIES}
    lost = ("round_up", "stranded", "short")
    saved = sums["entries"] - sums["used"]
    size = block_size if isinstance(block_size, int) else 1
    own_waste = 1 - fraction["token"]
    return {
        **{f"{name}_fraction": value for name, value in fraction.items()},
        "external_fraction": sum(sums[name] for name in lost) / slot_steps,
        "fragmented_fraction": (sums["round_up"] + sums["stranded"]) / slot_steps,
        "saved_fraction": saved * size / slot_steps,
        "sharing_saving": saved / sums["entries"] if sums["entries"] else 0.0,
        "running_mean": result.mean("rows"),
        "requests_mean": result.mean("requests"),
        "preemptions": sums["preemptions"],
        "copies": sums["copies"],
        "finished": sums["finished"],
        "cut": cut,
        "steps": result.steps,
        **{
            f"reclaimed_fraction_{name}": (value - own_waste) / value if value else 0.0
            for name, value in waste.items()
        },
    }


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
