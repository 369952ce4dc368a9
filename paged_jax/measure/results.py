"""Tidy results that an interrupted run resumes: ``rows.csv`` and ``run.json`` in one folder.

A *cell* is one combination of factors; its rows, one for each metric, reach the file in a single
write that is synced before ``append`` returns. A killed run therefore leaves whole cells and at
most one torn cell at the end, which ``resume`` drops. Cells may finish in any order; once all
of a plan are there the file is put into the plan's order, so interrupted and uninterrupted runs
of the same plan end in the same bytes. ``run.json`` says once what produced every row, hence a
run that differs from it in anything may not add rows. Cost: one sync a cell.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import fcntl
import json
import numbers
import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROWS = "rows.csv"
RUN = "run.json"

Cell = Sequence[object]


class Table:
    """Rows of one run: a context manager that puts a complete file into order on leaving."""

    def __init__(
        self,
        path: Path,
        layout: _Layout,
        plan: list[str],
        finished: set[str],
        created: list[Path],
        claim: int,
    ) -> None:
        self._path = path
        self._claim = claim
        self._created = created
        self._layout = layout
        self._plan = dict.fromkeys(plan)
        self._finished = finished
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        *,
        factors: Sequence[str],
        metrics: Sequence[tuple[str, str]],
        cells: Iterable[Cell],
        run: Mapping[str, Any],
        resume: bool | None = None,
    ) -> Self:
        """A table in folder ``out`` for the planned ``cells``, tuples of the ``factors``' values.

        ``metrics`` are (name, unit) pairs that every cell reports, ``run`` is what
        ``environment.describe`` returns. With ``resume`` the finished cells of ``out`` are kept;
        an empty folder is simply begun; None is for commands that cannot resume. Raises
        ``ValueError`` in one line, before anything is written, when ``out`` holds rows and
        ``resume`` is off, when its ``run.json`` differs from this run, when its rows are damaged
        elsewhere than at the end, or when a name or a value cannot stand in a CSV field.
        """
        layout = _Layout(factors, metrics)
        plan = [layout.key(cell) for cell in cells]
        if twice := [key for key, count in collections.Counter(plan).items() if count > 1]:
            raise ValueError(f"cells: {layout.name(twice[0])} is planned twice")
        record = _plain({**run, **layout.record(), "cells": len(plan)})
        folder = Path(out)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is not a folder: take another --out")
        created = [path for path in (folder / ROWS, folder / RUN, folder) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        claim = _claim(folder)
        with contextlib.ExitStack() as undo:
            undo.callback(_remove, created)
            undo.callback(os.close, claim)
            finished = _begin(folder, layout, plan, record, resume)
            undo.pop_all()
        return cls(folder / ROWS, layout, plan, finished, created, claim)

    def __contains__(self, cell: Cell) -> bool:
        """Whether the rows of ``cell`` are in the file."""
        return self._layout.key(cell) in self._finished

    def __len__(self) -> int:
        """Finished cells."""
        return len(self._finished)

    def append(self, cell: Cell, values: Mapping[str, float]) -> None:
        """Adds the rows of one planned cell, on disk when this returns; any thread may call it.

        Raises ``ValueError`` for a cell that is not planned or already there, and for values
        whose names are not exactly the table's metrics.
        """
        key = self._layout.key(cell)
        rows = self._layout.rows(key, values)
        with self._lock:
            if key not in self._plan:
                raise ValueError(f"{self._layout.name(key)} is no cell of this run")
            if key in self._finished:
                raise ValueError(f"{self._layout.name(key)} has its rows already")
            whole_bytes = self._path.stat().st_size
            if self._file.write(rows) != len(rows):
                self._file.truncate(whole_bytes)  # a full disk: the next cell must not follow this
                raise OSError(f"{self._path}: the file system took only part of a cell")
            os.fsync(self._file.fileno())
            self._finished.add(key)

    def close(self) -> None:
        """Closes the file and, when every planned cell is there, sorts it into the plan's order."""
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
            if len(self._finished) == len(self._plan):
                data = self._path.read_bytes()
                groups, _ = self._layout.split(data, self._path)
                ordered = self._layout.header + b"".join(groups[key] for key in self._plan)
                if ordered != data:
                    _replace(self._path, ordered)
            os.close(self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.close()
        if kind is not None and not self._finished:
            _remove(self._created)


def read(out: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of folder ``out``: factors, metric and unit as text, ``value`` as a float.

    Cells of an unfinished run come in the order in which they finished. Raises ``ValueError``
    when the file is damaged or ends inside a cell, which ``Table.open(resume=True)`` repairs.
    """
    folder = Path(out)
    record = _read_run(folder / RUN)
    layout = _Layout(record["factors"], [tuple(metric) for metric in record["metrics"]])
    data = (folder / ROWS).read_bytes()
    _, whole_bytes = layout.split(data, folder / ROWS)
    if whole_bytes < len(data) or not data:
        raise ValueError(f"{folder / ROWS} ends inside a cell: continue the run with --resume")
    rows: list[dict[str, Any]] = list(csv.DictReader(data.decode().splitlines()))
    for row in rows:
        row["value"] = float(row["value"])
    return rows


class _Layout:
    """Columns, and the one way in which a cell is written: its key is the text of its factors."""

    def __init__(self, factors: Sequence[str], metrics: Sequence[tuple[str, str]]) -> None:
        names = [name for name, _ in metrics]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"metrics: expected distinct names, at least one, got {names}")
        columns = (*factors, "metric", "value", "unit")
        if len(set(columns)) < len(columns):
            raise ValueError(f"factors: expected distinct names, not metric/value/unit: {factors}")
        self.factors = tuple(factors)
        self.metrics = {_field(name): _field(unit) for name, unit in metrics}
        self.header = (",".join(map(_field, columns)) + "\n").encode()

    def record(self) -> dict[str, object]:
        return {"factors": self.factors, "metrics": list(self.metrics.items())}

    def key(self, cell: Cell) -> str:
        if isinstance(cell, str) or len(cell) != len(self.factors):
            raise ValueError(f"cell: expected values of {self.factors}, got {cell!r}")
        return "".join(_field(value) + "," for value in cell)

    def name(self, key: str) -> str:
        return " ".join(map("=".join, zip(self.factors, key.split(","), strict=False)))

    def rows(self, key: str, values: Mapping[str, float]) -> bytes:
        if set(values) != set(self.metrics):
            raise ValueError(
                f"{self.name(key)}: expected values of {sorted(self.metrics)}, got {sorted(values)}"
            )
        return "".join(
            f"{key}{name},{_number(values[name], name)},{unit}\n"
            for name, unit in self.metrics.items()
        ).encode()

    def split(self, data: bytes, path: Path) -> tuple[dict[str, bytes], int]:
        """Whole cells by key, and the length of header and whole cells; the rest is torn.

        Raises ``ValueError`` where bytes are no cell of this layout and more follows: a kill or
        a lost power supply tears the last cell only, since each is synced before the next.
        """
        if not data.startswith(self.header):
            if self.header.startswith(data):
                return {}, 0
            raise ValueError(f"{path} line 1: expected {self.header.decode().strip()}")
        lines = [line + b"\n" for line in data[len(self.header) :].split(b"\n")[:-1]]
        groups: dict[str, bytes] = {}
        whole_bytes = len(self.header)
        for first in range(0, len(lines) - len(self.metrics) + 1, len(self.metrics)):
            group = b"".join(lines[first : first + len(self.metrics)])
            key = self._parse(group)
            if key is None and whole_bytes + len(group) == len(data):
                break
            if key is None or key in groups:
                fault = "not the rows of one cell" if key is None else "a cell a second time"
                raise ValueError(f"{path} lines {first + 2} and following: {fault}")
            groups[key] = group
            whole_bytes += len(group)
        return groups, whole_bytes

    def _parse(self, group: bytes) -> str | None:
        """The key of a cell's lines, or None: they must be what ``rows`` writes, byte for byte."""
        try:
            fields = [line.split(",") for line in group.decode().splitlines()]
            key = self.key(fields[0][:-3])
            values = {row[-3]: _parse_number(row[-2]) for row in fields}
            return key if self.rows(key, values) == group else None
        except (ValueError, IndexError):
            return None


def _remove(created: Iterable[Path]) -> None:
    """A run that failed before its first cell leaves nothing behind that it made."""
    for path in created:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file():
            path.unlink()


def _claim(folder: Path) -> int:
    """A descriptor that holds the folder for this process; the system lets go of a dead one's."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"{folder}: another run is writing there: take another --out") from None
    return descriptor


def _begin(
    folder: Path,
    layout: _Layout,
    plan: Collection[str],
    record: Mapping[str, Any],
    resume: bool | None,
) -> set[str]:
    """The finished cells of ``folder``, once it is sure that they may be continued, or not be."""
    rows_path, run_path = folder / ROWS, folder / RUN
    data = rows_path.read_bytes() if rows_path.exists() else b""
    holds_cells = len(data) > len(layout.header)
    if holds_cells and not resume:
        either = "" if resume is None else "continue it with --resume or "
        raise ValueError(f"{rows_path} exists: {either}take another --out")
    if holds_cells or (resume and run_path.exists()):
        _demand_same(_read_run(run_path), record, run_path)
    groups, whole_bytes = layout.split(data, rows_path)
    for key in groups:
        if key not in plan:
            raise ValueError(f"{rows_path}: {layout.name(key)} is no cell of this run")
    _replace(run_path, (json.dumps(record, indent=2) + "\n").encode())
    if whole_bytes == 0:
        _replace(rows_path, layout.header)
    elif whole_bytes < len(data):
        os.truncate(rows_path, whole_bytes)
    return set(groups)


def _field(value: object) -> str:
    text = str(value)
    if not text or not text.isprintable() or set(text) & set(',"') or text != text.strip():
        raise ValueError(f"{text!r}: a CSV field here is printable text without , and quotes")
    return text


def _number(value: object, name: str) -> str:
    """Shortest text that reads back as the same integer or double."""
    value = value.item() if hasattr(value, "item") else value  # NumPy and JAX scalars
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return repr(int(value) if isinstance(value, numbers.Integral) else float(value))


def _parse_number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as JSON will give it back: tuples become lists."""
    return json.loads(json.dumps(record))


def _read_run(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: without it rows cannot be continued or read"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or not {"factors", "metrics"} <= record.keys():
        raise ValueError(f"{path} was not written by a run: it names no factors and metrics")
    return record


def _demand_same(recorded: Mapping[str, Any], record: Mapping[str, Any], path: Path) -> None:
    before, now = _flatten(recorded), _flatten(record)
    for name in sorted(before.keys() | now.keys()):
        if name not in before or name not in now or before[name] != now[name]:
            raise ValueError(
                f"{path} records {name}={before.get(name)}, this run has {now.get(name)}:"
                " resume with the same or take another --out"
            )


def _flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _replace(path: Path, data: bytes) -> None:
    """Writes a file in one step: a reader, or a kill, sees the old bytes or the new ones."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
