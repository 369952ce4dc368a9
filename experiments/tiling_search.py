"""Which legal tiling of a kernel is fastest? Coordinate descent over the fields of ``Tiling``.

From the kernel's own sizes, one field after another is set to each of its values that the back end
does not refuse, and the fastest is kept, until a whole round changes nothing or the time is up.
Findings go to ``<device kind>.json`` in the form that ``pallas_kernels.tiling`` reads from
``pallas_kernels/tuned``: for each shape an entry with its rows and row blocks, and for each kind of
cache one without them, which leaves the splits to the formula.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import attention_inputs, kernel_plan
from experiments.kernel_plan import Cell
from experiments.kernel_timing import Stopwatch
from paged_jax.measure import progress, results
from pallas_kernels import ops
from pallas_kernels import tiling as tilings
from pallas_kernels.problem import Problem
from pallas_kernels.tiling import Tiling

# As they matter to a decode step: a search that runs out of time has tried the first ones.
FIELDS = ("splits", "tokens", "heads", "stages", "queries")
VALUES = {
    "splits": (1, 2, 4, 8, 16, 32, 64),
    "tokens": (16, 32, 64, 128, 256, 512, 1024),
    "heads": (1, 2, 4, 8, 16),
    "stages": (1, 2, 3, 4, 6),
    "queries": (8, 16, 32, 64, 128, 256),
}
FACTORS = ("kernel", "backend", "batch", "context", "block_size", "dtype")
METRICS = (
    ("default_microseconds", "us"),
    ("best_microseconds", "us"),
    ("tried", "1"),
    *((field, "1") for field in FIELDS),
)
NOISE = 0.02  # a smaller gain is none
GENERAL = (
    *("decode", "dtype", "cache_dtype", "k_scale", "v_scale"),
    *("query_heads", "kv_heads", "width", "block_size"),
)
SPECIFIC = (*GENERAL, "rows", "row_blocks")

Seconds = Callable[[Tiling], float | None]  # None: it cannot run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The fastest tiling of a problem, its seconds, and those of the tiling it started from."""

    problem: Problem
    tiling: Tiling
    seconds: float
    start_seconds: float
    tried: int


def search(
    backend: str, problem: Problem, seconds_of: Seconds, *, budget_seconds: float
) -> Found | None:
    """The fastest tiling found from the kernel's own on; None if not even that one runs."""
    deadline = time.monotonic() + budget_seconds
    best = kernel_plan.full_tiling(backend, problem)
    start_seconds = seconds_of(best)
    if start_seconds is None:
        return None
    timed = {best}
    least, improved = start_seconds, True
    while improved:
        improved = False
        for field in fields_of(backend, problem):
            for candidate in legal(backend, problem, best, field):
                if candidate in timed or time.monotonic() > deadline:
                    continue
                timed.add(candidate)
                seconds = seconds_of(candidate)
                if seconds is not None and seconds < (1 - NOISE) * least:
                    best, least, improved = candidate, seconds, True
    return Found(
        problem=problem,
        tiling=best,
        seconds=least,
        start_seconds=start_seconds,
        tried=len(timed),
    )


def fields_of(backend: str, problem: Problem) -> tuple[str, ...]:
    """The fields that matter to a problem, the most important first."""
    if problem.decode:
        return FIELDS
    # A kernel splits those rows of a ragged batch that decode; in a prefill there are none.
    splits = () if backend in ops.KERNELS.values() else FIELDS[:1]
    return ("queries", *splits, *FIELDS[1:-1])


def legal(backend: str, problem: Problem, tiling: Tiling, field: str) -> Iterator[Tiling]:
    """Tilings that differ in one field, of those that the back end serves."""
    module = kernel_plan.backend_module(backend)
    for value in VALUES[field]:
        candidate = dataclasses.replace(tiling, **{field: value})
        if candidate != tiling and module.refusal(problem, candidate) is None:
            yield candidate


def tabulate(
    cells: Sequence[Cell],
    watch: Stopwatch,
    budget_seconds: float,
    out: str,
    tuned: str,
    run: Mapping[str, Any],
    *,
    resume: bool,
) -> None:
    """Searches the paged cells, writes rows to ``out`` and entries to a file in ``tuned``."""
    shapes = {
        tuple(getattr(cell, factor) for factor in FACTORS): cell
        for cell in cells
        if cell.contender == "paged" and cell.lengths == "full"
    }
    table = results.Table.open(
        out, factors=FACTORS, metrics=METRICS, cells=list(shapes), run=run, resume=resume
    )
    path = Path(tuned) / tilings.file_name(jax.devices()[0].device_kind)
    found: dict[str, list[Found]] = {}
    with table, progress.Progress(len(shapes), "shapes", done=len(table)) as bar:
        for factors, cell in shapes.items():
            if factors in table:
                continue
            one = _search_cell(cell, watch, budget_seconds)
            bar.advance()
            if one is None:
                continue
            found.setdefault(cell.backend, []).append(one)
            write(path, [entry for name in found for entry in entries(name, found[name])])
            table.append(factors, _values(one))
            gain = one.start_seconds / one.seconds
            print(*factors, one.tiling, f"{1e6 * one.seconds:.1f} us, {gain:.2f} x faster")
    print(path)


def _search_cell(cell: Cell, watch: Stopwatch, budget_seconds: float) -> Found | None:
    def seconds_of(tiling: Tiling) -> float | None:
        timings, errors = watch.time_calls([cell], tiling)
        for error in errors.values():
            print(*cell, tiling, "failed:", str(error).partition("\n")[0])
        return timings[cell].run_seconds if timings else None

    problem = attention_inputs.problem_of(watch.settings.shape(cell))
    return search(cell.backend, problem, seconds_of, budget_seconds=budget_seconds)


def _values(found: Found) -> dict[str, float]:
    return {
        "default_microseconds": 1e6 * found.start_seconds,
        "best_microseconds": 1e6 * found.seconds,
        "tried": found.tried,
        **{field: getattr(found.tiling, field) for field in FIELDS},
    }


def entries(backend: str, found: Sequence[Found]) -> list[dict[str, Any]]:
    """Entries of a tuned file: one a problem, then one for all problems like the largest."""
    specific = [_entry(backend, one, SPECIFIC) for one in found]
    general: dict[str, dict[str, Any]] = {}
    for one in sorted(found, key=lambda one: one.problem.rows * one.problem.row_blocks):
        entry = _entry(backend, one, GENERAL)
        entry["tiling"].pop("splits", None)  # these depend on the rows and their blocks
        general[json.dumps(entry["when"])] = entry
    return specific + list(general.values())


def _entry(backend: str, found: Found, when: Sequence[str]) -> dict[str, Any]:
    fields = fields_of(backend, found.problem)
    return {
        "backend": backend,
        "when": {name: getattr(found.problem, name) for name in when},
        "tiling": {name: getattr(found.tiling, name) for name in fields},
    }


def write(path: Path, fresh: Sequence[Mapping[str, Any]]) -> None:
    """Puts entries into a tuned file, in place of those for the same problems.

    Entries with more conditions stand first, since the first that fits counts.
    """
    old = json.loads(path.read_text()) if path.exists() else []
    replaced = [(entry["backend"], entry["when"]) for entry in fresh]
    kept = [entry for entry in old if (entry["backend"], entry["when"]) not in replaced]
    ordered = sorted([*kept, *fresh], key=lambda entry: -len(entry["when"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(entry) for entry in ordered)
    path.write_text(f"[\n  {lines}\n]\n")
