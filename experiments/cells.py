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
BASELINES = tuple(name for name in ALLOCATORS if name != "paged")


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
            for block_size in (self.block_sizes if allocator == "paged" else (NO_BLOCKS,))
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


def requests_of(settings: Settings, group: Group, factor: int = 1) -> Requests:
    """What arrives in a group: ``factor`` times as many requests as its runs seem to need."""
    workload = dataclasses.replace(settings.workloads[group.workload], sharing=group.sharing)
    if settings.replayed is not None:
        return replay(
            settings.replayed,
            step_seconds=settings.step_seconds,
            max_length=workload.max_length,
        )
    count = _count_needed(workload, group.pool_slots, settings.warmup_steps + settings.steps)
    return draw(workload, group.seed, factor * count)


def bounds_of(settings: Settings) -> Bounds:
    """Array sizes with which one program of each kind serves the whole sweep."""
    shortest = {group.workload: group for group in settings.groups()}
    firsts = [requests_of(settings, group) for group in shortest.values()]
    block_sizes = settings.block_sizes if "paged" in settings.allocators else (1,)
    return Bounds(
        requests=_power_of_two(max(first.count for first in firsts)),
        output=_power_of_two(max(int(first.output_RF.max()) for first in firsts)),
        blocks=max(settings.pool_slots) // min(block_sizes),
        block_size=max(block_sizes),
    )


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

    Baselines are run whether wanted or not: the others are measured against them. Where a run
    admits all requests before its time is up, the whole group starts again with more of them.
    """
    if not wanted:
        return
    factor = 1
    while (done := _run_all(settings, group, wanted, bounds, factor)) is None:
        factor *= 2
    requests, by_column = done
    waste = {
        name: 1 - result.sums["token"] / (result.steps * group.pool_slots)
        for (name, _), result in by_column.items()
        if name in BASELINES
    }
    for (name, block_size), result in by_column.items():
        cell = cell_of(group, name, block_size)
        if cell in wanted:
            yield cell, _measure(result, group.pool_slots, block_size, requests, waste)


def _run_all(
    settings: Settings, group: Group, wanted: set[tuple], bounds: Bounds, factor: int
) -> tuple[Requests, dict[tuple, simulator.Result]] | None:
    """Results by allocator and block size, or None where the requests ran out."""
    requests = requests_of(settings, group, factor)
    # The caller's bounds keep its programs; requests that pass them take programs of their own.
    bounds = dataclasses.replace(
        bounds,
        requests=max(bounds.requests, _power_of_two(requests.count)),
        output=max(bounds.output, _power_of_two(int(requests.output_RF.max()))),
    )
    with simulator.on_cpu():
        work = arrays.put(requests, bounds.requests)
    done = {}
    for name, block_size in settings.columns():
        if name not in BASELINES and cell_of(group, name, block_size) not in wanted:
            continue
        config = PoolConfig(
            pool_slots=group.pool_slots,
            block_size=block_size if isinstance(block_size, int) else 1,
            max_length=settings.workloads[group.workload].max_length,
        )
        try:
            result = simulator.simulate(
                requests,
                ALLOCATORS[name],
                config,
                steps=settings.steps,
                warmup_steps=settings.warmup_steps,
                limits=policy.limits(
                    rows=settings.max_rows,
                    blocks=config.blocks,
                    watermark=settings.watermark if name == "paged" else 0.0,
                ),
                bounds=bounds,
                work=work,
            )
        except simulator.NeverFitsError as error:
            raise ValueError(
                f"{group.workload}, {name}, seed {group.seed}: {error}: raise --pool_slots, cut"
                " requests by --max_length, or leave the allocator out"
            ) from None
        if result.exhausted and settings.replayed is None:
            return None
        if result.steps == 0:
            raise ValueError(
                f"warmup_steps: {group.workload} is over before {settings.warmup_steps} steps"
            )
        done[name, block_size] = result
    return requests, done


def _measure(
    result: simulator.Result,
    pool_slots: int,
    block_size: int | str,
    requests: Requests,
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
        "cut": float(requests.cut_R.mean()),
        "steps": result.steps,
        **{
            f"reclaimed_fraction_{name}": (value - own_waste) / value if value else 0.0
            for name, value in waste.items()
        },
    }


def _count_needed(workload: Workload, pool_slots: int, steps: int) -> int:
    """Requests that a run of ``steps`` steps can hardly use up.

    A request holds at least its own prompt and half its output while it runs, so a full pool gets
    through about slots * steps / E[output * (prompt + output / 2)] of them; a third on top.
    """
    alone = dataclasses.replace(workload, sharing=0.0, arrivals=arrivals.Saturated())
    probe = draw(alone, seed=0, count=4_096)
    output_RF = probe.output_RF.astype(np.float64)
    held = (output_RF * (probe.prompt_R[:, None] / probe.samples + output_RF / 2)).sum(axis=1)
    at_once = pool_slots / (probe.prompt_R + output_RF.sum(axis=1) / 2).mean()
    needed = 4 / 3 * (pool_slots * steps / held.mean() + at_once)
    rate = getattr(workload.arrivals, "rate", math.inf)  # requests a step, where there is one
    return math.ceil(min(needed, 4 / 3 * rate * steps + 100))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
