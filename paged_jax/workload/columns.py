"""Checked columns of a text file: CSV with a header, or one JSON object a line.

A value is read or refused, never repaired: every refusal is a ``ValueError`` of one line,
``FILE:LINE: column NAME: expected WHAT, got VALUE``. gzip is undone where the file begins with its
two magic bytes. Cost: about a microsecond a value.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from paged_jax.workload import ragged

_INT32 = int(np.iinfo(np.int32).max)
_INT64 = int(np.iinfo(np.int64).max)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """R rows by column name; a value is text in CSV, and what JSON made of it in JSON."""

    path: str
    columns: Mapping[str, Sequence[object]]
    lines: Sequence[int]  # the line of the file that each row stands on
    textual: bool

    def refuse(self, name: str, index: int, expected: str) -> NoReturn:
        """Raises the ``ValueError`` that names this value."""
        refuse(self.path, self.lines[index], name, expected, self.columns[name][index])

    def integers(self, name: str, *, least: int = 1, most: int = _INT32) -> np.ndarray:
        """A column of whole numbers from ``least`` to ``most``: int64 [R]."""
        values = self.columns[name]
        for index, value in enumerate(values):
            whole = _is_digits(value) if self.textual else type(value) is int
            if not whole or not least <= int(value) <= most:  # type: ignore[call-overload]
                self.refuse(name, index, f"a whole number from {least} to {most}")
        return np.array([int(value) for value in values], np.int64)  # type: ignore[call-overload]

    def lists(self, name: str) -> ragged.Ragged:
        """A column of lists of whole numbers from 0 to 2**63 - 1."""
        rows: list[list[int]] = []
        for index, value in enumerate(self.columns[name]):
            if not isinstance(value, list) or not all(
                type(item) is int and 0 <= item <= _INT64 for item in value
            ):
                self.refuse(name, index, f"a list of whole numbers from 0 to {_INT64}")
            rows.append(value)
        return ragged.pack(rows)

    def demand_order(self, name: str, time_R: np.ndarray) -> None:
        """Refuses the first arrival that is earlier than the one before it."""
        backward_R = np.diff(time_R) < 0
        if backward_R.any():
            index = int(np.argmax(backward_R)) + 1
            before = self.columns[name][index - 1]
            self.refuse(name, index, f"arrivals in order, not before {before!r}")


def refuse(path: str, line: int, column: str, expected: str, value: object) -> NoReturn:
    """Raises the one-line ``ValueError`` of this package's readers."""
    where = f"column {column}: " if column else ""
    raise ValueError(f"{path}:{line}: {where}expected {expected}, got {_shown(value)}")


def read_text(path: str) -> str:
    """The file's text; ``ValueError`` when it is empty, no UTF-8 or broken gzip."""
    content = pathlib.Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got: {error}") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got byte {error.start} not so") from None
    if not text.strip():
        raise ValueError(f"{path}:1: expected a CSV header or a JSON object, got an empty file")
    return text


def csv_table(path: str, text: str) -> Table:
    """All columns of a CSV file with a header and at least one row."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        header = next(reader)
        for row in reader:
            if len(row) != len(header):
                _refuse_width(path, reader.line_num, header, row)
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num}: expected CSV, got: {error}") from None
    if len(set(header)) < len(header):
        refuse(path, 1, "", "different column names", ",".join(header))
    if not rows:
        raise ValueError(f"{path}:2: expected a request, got the end of the file")
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    return Table(path=path, columns=columns, lines=lines, textual=True)


def json_table(path: str, text: str, names: Sequence[str]) -> Table:
    """The named columns of a file of JSON objects, one a line."""
    columns: dict[str, list[object]] = {name: [] for name in names}
    texts = text.removesuffix("\n").split("\n")  # splitlines would also split at U+2028
    for line, row in enumerate(texts, 1):
        entry = json_object(path, line, row)
        for name in names:
            if name not in entry:
                raise ValueError(f"{path}:{line}: column {name}: expected a value, got no such key")
            columns[name].append(entry[name])
    return Table(path=path, columns=columns, lines=range(1, len(texts) + 1), textual=False)


def json_object(path: str, line: int, text: str) -> dict[str, object]:
    """The JSON object that ``text`` is."""
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        refuse(path, line, "", "a whole JSON object", text)
    return entry


def _refuse_width(path: str, line: int, header: list[str], row: list[str]) -> NoReturn:
    if len(row) > len(header):
        refuse(path, line, "", f"{len(header)} columns", f"{len(row)}")
    if not row:
        refuse(path, line, header[0], "a value", "")
    missing = header[len(row)]
    raise ValueError(f"{path}:{line}: column {missing}: expected a value, got the end of the line")


def _is_digits(value: object) -> bool:
    # int() alone would also take "1_000", " 7", "+7" and digits of other scripts.
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
