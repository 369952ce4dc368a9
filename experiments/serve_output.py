"""What ``experiments.serve`` writes beside its rows, and what it prints."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from paged_jax.serving.served import Served

REQUESTS, STEPS = "requests.csv", "steps.csv"
REQUEST_COLUMNS = (
    *("rate", "request", "arrival_seconds", "prompt_tokens", "output_tokens", "start_seconds"),
    *("first_token_seconds", "finish_seconds", "normalised_latency", "error"),
)
STEP_COLUMNS = (
    *("rate", "seconds", "running", "waiting", "used_fraction", "token_fraction"),
    "host_used_fraction",
)
PRINTED = (
    ("served", "{:.0f}"),
    ("normalised_latency_mean", "{:.4g}"),
    ("normalised_latency_p99", "{:.4g}"),
    ("first_token_mean", "{:.4g}"),
    ("output_tokens_per_second", "{:.1f}"),
    ("running_mean", "{:.1f}"),
    ("preemptions", "{:.0f}"),
    ("swaps", "{:.0f}"),
    ("token_fraction", "{:.1%}"),
)
HEADINGS = (
    *("rate", "served", "s/token", "p99", "first, s", "tokens/s", "running", "preempted"),
    *("swapped", "token"),
)


def append(out: str, rate: object, result: Served, *, first: bool) -> None:
    """Adds the requests and the steps of a run to the files of folder ``out``.

    The ``first`` run begins them anew. An interrupt leaves them as they were, or with all of this.
    """
    asked, steps = result.requests, result.steps
    columns = (
        asked.number_R,
        asked.arrival_seconds_R,
        asked.prompt_R,
        asked.output_R,
        result.start_seconds_R,
        result.first_seconds_R,
        result.finish_seconds_R,
        result.normalised_latency_R,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    _write(
        Path(out) / REQUESTS,
        REQUEST_COLUMNS,
        ((rate, *row, result.refused.get(index, "")) for index, row in enumerate(rows)),
        first=first,
    )
    token_X = steps.slots("token") / steps.ledger_XJ.sum(axis=1)
    fractions = (steps.used_X, token_X, steps.host_used_X)
    series = (steps.seconds_X, steps.running_X, steps.waiting_X, *fractions)
    moments = zip(*(column.tolist() for column in series), strict=True)
    _write(Path(out) / STEPS, STEP_COLUMNS, ((rate, *moment) for moment in moments), first=first)


def report(rate: object, result: Served, values: Mapping[str, float], *, first: bool) -> None:
    """Prints a run's line, under headings if it is the first, and why requests were refused."""
    if first:
        print("".join(f"{heading:>10}" for heading in HEADINGS))
    shown = [form.format(values[name]) for name, form in PRINTED]
    print("".join(f"{text:>10}" for text in (str(rate), *shown)), flush=True)
    if result.refused:
        index, why = next(iter(result.refused.items()))
        number = result.requests.number_R[index]
        print(f"{len(result.refused)} refused, the first is request {number}: {why}")


def _write(
    path: Path, columns: Iterable[str], rows: Iterable[Iterable[object]], *, first: bool
) -> None:
    part = path.with_suffix(".part")
    if not first:
        shutil.copyfile(path, part)
    with part.open("w" if first else "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if first:
            writer.writerow(columns)
        for row in rows:
            writer.writerow(
                "" if isinstance(one, float) and math.isnan(one) else one for one in row
            )
    part.replace(path)
