"""Cells of a sweep: one run of the simulator each, and the metrics it reports."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from experiments import sources
from experiments.plan import BASELINES, FACTORS, Group, Settings, cell_of
from paged_jax.config import Bounds, PoolConfig
from paged_jax.measure import environment, progress, results
from paged_jax.memory import ledger
from paged_jax.memory.allocators import ALLOCATORS
from paged_jax.scheduling import policy
from paged_jax.serving import simulator
from paged_jax.workload import lengths
from paged_jax.workload.requests import independent
from paged_jax.workload.sharing import with_samples


def tabulate(
    settings: Settings, out: str, flags: Mapping[str, Any], *, resume: bool
) -> list[dict[str, Any]]:
    """Runs a sweep into folder ``out``; returns its rows. ``flags`` are those that decide them."""
    table = results.Table.open(
        out,
        factors=FACTORS,
        metrics=settings.metrics(),
        cells=settings.cells(),
        run=environment.describe(flags, range(settings.seeds)),
        resume=resume,
    )
    with table:
        run(settings, table)
    return results.read(out)


def check(settings: Settings) -> None:
    """Raises ``ValueError`` where a cell holds requests that could never run, before any runs.

    Looks at the first seed of each workload, and at all requests of a trace.
    """
    for name, workload in settings.workloads.items():
        if workload.samples > settings.max_rows:
            raise ValueError(
                f"{name}: a request has {workload.samples} samples, --max_rows lets"
                f" {settings.max_rows} run at once"
            )
    for group in settings.groups():
        if group.seed:
            continue
        workload = settings.workloads[group.workload]
        checked = [sources.requests_of(settings, group, sources.PROBE)]
        if isinstance(workload.law, lengths.Empirical):
            law = workload.law
            cut = lengths.cut(law.prompt_R, law.output_R[:, None], workload.max_length)
            checked.append(with_samples(independent(*cut[:2]), workload.samples))
        for requests in checked:
            for name, block_size in settings.columns():
                config = _config(settings, group, block_size)
                _refuse(ALLOCATORS[name].refusal(requests, config), group, name)


def run(settings: Settings, table: results.Table) -> None:
    """Runs all cells that ``table`` lacks: a group a thread, as each run is one native loop.

    An interrupt lets the cells in flight finish, and is raised when they are written.
    """
    groups = settings.groups()
    bounds = sources.bounds_of(settings)
    stop = threading.Event()

    def work(group: Group) -> None:
        group_cells = {cell_of(group, *column) for column in settings.columns()}
        wanted = {cell for cell in group_cells if cell not in table}
        for cell, values in run_group(settings, group, wanted, bounds, stop):
            table.append(cell, values)
            bar.advance()

    planned = len(groups) * len(settings.columns())
    with (
        progress.Progress(planned, "cells", done=len(table)) as bar,
        _interrupts(stop),
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        try:
            for future in as_completed([pool.submit(work, group) for group in groups]):
                future.result()
        finally:
            stop.set()  # after an error the other threads need not go on
    if len(table) < planned:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _interrupts(stop: threading.Event) -> Iterator[None]:
    """Meanwhile an interrupt sets ``stop``: raised inside JAX, it may be lost."""
    before = signal.getsignal(signal.SIGINT)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or before is signal.SIG_IGN:
        yield
        return

    def finish(*_: object) -> None:
        if not stop.is_set():
            print("\ninterrupted: finishing the cells in flight", file=sys.stderr)
        stop.set()

    signal.signal(signal.SIGINT, finish)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_group(
    settings: Settings, group: Group, wanted: set[tuple], bounds: Bounds, stop: threading.Event
) -> Iterator[tuple[tuple, dict[str, float]]]:
    """The ``wanted`` cells of a group, each with the values of its metrics, until ``stop`` is set.

    Baselines run first, wanted or not: all cells are measured against them.
    """
    if not wanted or stop.is_set():
        return
    source = sources.Source(settings, group, bounds)
    baselines = {}
    for column in settings.columns():
        if column[0] in BASELINES:
            baselines[column] = _simulate(source, column)
            if stop.is_set():
                return
    waste = {name: _waste(result, group.pool_slots) for (name, _), result in baselines.items()}
    for column in settings.columns():
        cell = cell_of(group, *column)
        if cell in wanted:
            result = baselines.get(column) or _simulate(source, column)
            config = _config(settings, group, column[1])
            yield cell, _measure(result, config, source.cut(), waste)
            if stop.is_set():
                return


def _simulate(source: sources.Source, column: tuple[str, int | str]) -> simulator.Result:
    """One cell, with as many requests as it takes for none to be lacking."""
    settings, group, (name, block_size) = source.settings, source.group, column
    config = _config(settings, group, block_size)
    limits = policy.limits(
        rows=settings.max_rows,
        blocks=config.blocks,
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
            _refuse(str(error), group, name)
        if result.exhausted and settings.replayed is None:
            source.extend()
        elif settings.until_done and result.run.queue.finished < source.requests.count:
            raise ValueError(
                f"{group.workload}, {name}: not served within {settings.steps} steps: raise"
                " --step_seconds, or give --steps"
            )
        elif result.steps == 0:
            raise ValueError(
                f"warmup_steps: {group.workload} is over before {settings.warmup_steps} steps"
            )
        else:
            return result


def _config(settings: Settings, group: Group, block_size: int | str) -> PoolConfig:
    return PoolConfig(
        pool_slots=group.pool_slots,
        block_size=block_size if isinstance(block_size, int) else 1,
        max_length=settings.workloads[group.workload].max_length,
    )


def _refuse(refusal: str | None, group: Group, name: str) -> None:
    if refusal:
        raise ValueError(
            f"{group.workload}, {name}, pool of {group.pool_slots} slots: {refusal}: raise"
            " --pool_slots, cut requests by --max_length, or leave the allocator out"
        )


def _waste(result: simulator.Result, pool_slots: int) -> float:
    return 1 - result.sums["token"] / (result.steps * pool_slots)


def _measure(
    result: simulator.Result, config: PoolConfig, cut: float, waste: dict[str, float]
) -> dict[str, float]:
    sums, slot_steps = result.sums, result.steps * config.pool_slots
    fraction = {name: sums[name] / slot_steps for name in ledger.CATEGORIES}
    lost = ("round_up", "stranded", "short")
    saved = sums["entries"] - sums["used"]
    own_waste = _waste(result, config.pool_slots)
    return {
        **{f"{name}_fraction": value for name, value in fraction.items()},
        "external_fraction": sum(sums[name] for name in lost) / slot_steps,
        "fragmented_fraction": (sums["round_up"] + sums["stranded"]) / slot_steps,
        "saved_fraction": saved * config.block_size / slot_steps,
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
