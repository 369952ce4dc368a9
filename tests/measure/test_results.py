"""A run that is killed anywhere and resumed ends in the bytes of one that was not."""

from __future__ import annotations

import concurrent.futures
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.measure import results

FACTORS = ("workload", "block_size", "seed")
METRICS = (("token_fraction", "1"), ("steps", "step"))
CELLS = [("chat", size, seed) for size in (8, 16) for seed in (0, 1)]
RUN = {"flags": {"steps": 100, "sizes": (8, 16)}, "versions": {"jax": "1.2"}}


def open_table(out: Path, *, resume: bool = False, **changes: Any) -> results.Table:
    settings = {"factors": FACTORS, "metrics": METRICS, "cells": CELLS, "run": RUN} | changes
    return results.Table.open(out, resume=resume, **settings)


def measured(cell: tuple[str, int, int]) -> dict[str, float]:
    return {"steps": 100 + cell[2], "token_fraction": cell[1] / 3}


def complete(out: Path, *, resume: bool = False, order: int = 1) -> bytes:
    with open_table(out, resume=resume) as table:
        for cell in CELLS[::order]:
            if cell not in table:
                table.append(cell, measured(cell))
    return (out / "rows.csv").read_bytes()


def one_line(error: pytest.ExceptionInfo[ValueError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_file_is_one_observation_a_row(tmp_path: Path) -> None:
    lines = complete(tmp_path / "new" / "out").decode().splitlines()
    assert lines[:3] == [
        "workload,block_size,seed,metric,value,unit",
        "chat,8,0,token_fraction,2.6666666666666665,1",
        "chat,8,0,steps,100,step",
    ]
    assert len(lines) == 1 + len(CELLS) * len(METRICS)
    record = json.loads((tmp_path / "new" / "out" / "run.json").read_text())
    assert record["flags"] == {"steps": 100, "sizes": [8, 16]}
    assert record["cells"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("order", [1, -1])
def test_file_torn_at_any_byte_resumes_to_the_same_bytes(tmp_path: Path, order: int) -> None:
    whole = complete(tmp_path / "whole")
    with open_table(tmp_path / "torn") as table:  # not all cells: the file keeps finishing order
        for cell in CELLS[1::order]:
            table.append(cell, measured(cell))
        written = (tmp_path / "torn" / "rows.csv").read_bytes()
        record = (tmp_path / "torn" / "run.json").read_bytes()
    header_bytes = len(whole.split(b"\n")[0]) + 1
    for kept_bytes in range(len(written) + 1):
        (tmp_path / "torn" / "rows.csv").write_bytes(written[:kept_bytes])
        with open_table(tmp_path / "torn", resume=True) as table:
            rows = written[header_bytes:kept_bytes].count(b"\n")
            assert len(table) == rows // len(METRICS)
        assert complete(tmp_path / "torn", resume=True) == whole
        assert (tmp_path / "torn" / "run.json").read_bytes() == record
    assert sorted(os.listdir(tmp_path / "torn")) == ["rows.csv", "run.json"]


def test_order_of_finishing_does_not_show(tmp_path: Path) -> None:
    whole = complete(tmp_path / "whole")
    assert complete(tmp_path / "reversed", order=-1) == whole
    with (
        open_table(tmp_path / "threads") as table,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        list(pool.map(lambda cell: table.append(cell, measured(cell)), CELLS))
    assert (tmp_path / "threads" / "rows.csv").read_bytes() == whole


def test_finished_cells_are_kept_not_measured_again(tmp_path: Path) -> None:
    with open_table(tmp_path) as table:
        table.append(CELLS[2], {"steps": 7, "token_fraction": 0.5})
        assert CELLS[2] in table
        assert CELLS[0] not in table
    complete(tmp_path, resume=True)
    values = [row["value"] for row in results.read(tmp_path) if row["metric"] == "steps"]
    assert values == [100, 101, 7, 101]


def test_killed_between_run_json_and_rows_starts_over(tmp_path: Path) -> None:
    whole = complete(tmp_path / "whole")
    for resume in (False, True):
        out = tmp_path / f"resume_{resume}"
        out.mkdir()
        (out / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
        assert complete(out, resume=resume) == whole
    assert complete(tmp_path / "nothing yet", resume=True) == whole


def test_rows_are_not_overwritten(tmp_path: Path) -> None:
    whole = complete(tmp_path)
    with pytest.raises(ValueError, match="--resume or take another --out") as error:
        open_table(tmp_path)
    assert one_line(error)
    assert (tmp_path / "rows.csv").read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run": RUN | {"flags": {"steps": 200, "sizes": (8, 16)}}}, "flags.steps=100"),
        ({"run": RUN | {"flags": {"steps": 100, "sizes": (8, 32)}}}, "flags.sizes="),
        ({"run": RUN | {"flags": {"steps": 100, "sizes": (8, 16), "new": 1}}}, "flags.new=None"),
        ({"run": RUN | {"versions": {"jax": "1.3"}}}, "versions.jax=1.2, this run has 1.3"),
        ({"cells": CELLS[:3]}, "cells=4"),
        ({"factors": ("workload", "size", "seed")}, "factors="),
        ({"metrics": (("token_fraction", "slot"), ("steps", "step"))}, "metrics="),
    ],
)
def test_another_run_may_not_add_rows(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    complete(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="resume with the same or take another") as error:
        open_table(tmp_path, resume=True, **changes)
    assert named in one_line(error)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_same_number_of_other_cells_is_refused(tmp_path: Path) -> None:
    complete(tmp_path)
    with pytest.raises(ValueError, match="block_size=8 seed=1 is no cell of this run"):
        open_table(tmp_path, resume=True, cells=[("chat", 8, 9), *CELLS[:1], *CELLS[2:]])


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [b"another,header", *lines[1:]],
        lambda lines: [*lines[:2], *lines[3:]],  # a row lost in the middle
        lambda lines: [*lines[:1], lines[2], lines[1], *lines[3:]],
        lambda lines: [*lines[:3], *lines[1:]],  # a cell twice
        lambda lines: [lines[0], lines[1].replace(b"2.6", b"2.60"), *lines[2:]],
        lambda lines: [lines[0], lines[1].replace(b"2.6", b"x"), *lines[2:]],
        lambda lines: [lines[0], b"", *lines[2:]],
    ],
)
def test_damage_before_the_end_is_refused(tmp_path: Path, damage: Any) -> None:
    lines = complete(tmp_path).split(b"\n")
    (tmp_path / "rows.csv").write_bytes(b"\n".join(damage(lines)))
    for attempt in (lambda: open_table(tmp_path, resume=True), lambda: results.read(tmp_path)):
        with pytest.raises(ValueError, match=r"rows\.csv line") as error:
            attempt()
        assert one_line(error)


def test_last_cell_of_zero_bytes_is_dropped(tmp_path: Path) -> None:
    whole = complete(tmp_path)
    tail_bytes = len(b"\n".join(whole.split(b"\n")[-2:]))
    (tmp_path / "rows.csv").write_bytes(whole[:-tail_bytes] + b"\0" * (tail_bytes - 1) + b"\n")
    with pytest.raises(ValueError, match="ends inside a cell"):
        results.read(tmp_path)
    assert complete(tmp_path, resume=True) == whole


def test_rows_without_run_json_are_refused(tmp_path: Path) -> None:
    complete(tmp_path)
    for text in (None, "{", "[]"):
        (tmp_path / "run.json").unlink(missing_ok=True)
        if text is not None:
            (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json (is|was) ") as error:
            open_table(tmp_path, resume=True)
        assert one_line(error)


def test_read_gives_rows_and_refuses_a_torn_end(tmp_path: Path) -> None:
    whole = complete(tmp_path)
    rows = results.read(tmp_path)
    assert len(rows) == len(CELLS) * len(METRICS)
    assert rows[0] == {
        "workload": "chat",
        "block_size": "8",
        "seed": "0",
        "metric": "token_fraction",
        "value": 8 / 3,
        "unit": "1",
    }
    (tmp_path / "rows.csv").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="ends inside a cell"):
        results.read(tmp_path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"),
        (3, "3"),
        (-3, "-3"),
        (1e300, "1e+300"),
        (float("nan"), "nan"),
        (np.float32(0.5), "0.5"),
        (np.int64(2**60), str(2**60)),
        (jnp.int32(7), "7"),
        (np.array(0.25), "0.25"),
    ],
)
def test_value_is_written_as_the_shortest_exact_text(tmp_path: Path, value: Any, text: str) -> None:
    with open_table(tmp_path, cells=CELLS[:1]) as table:
        table.append(CELLS[0], {"token_fraction": value, "steps": 1})
    assert f"token_fraction,{text},1\n" in (tmp_path / "rows.csv").read_text()
    with open_table(tmp_path, cells=CELLS[:1], resume=True) as table:
        assert CELLS[0] in table


def test_wrong_appends_are_refused(tmp_path: Path) -> None:
    table = open_table(tmp_path)
    table.append(CELLS[0], measured(CELLS[0]))
    before = (tmp_path / "rows.csv").read_bytes()
    for cell, values, message in [
        (CELLS[0], measured(CELLS[0]), "has its rows already"),
        (("chat", 8, 9), measured(CELLS[0]), "is no cell of this run"),
        (("chat", 8), measured(CELLS[0]), "expected values of"),
        (CELLS[1], {"steps": 1}, "expected values of"),
        (CELLS[1], {"steps": 1, "token_fraction": 1, "more": 1}, "expected values of"),
        (CELLS[1], {"steps": "1", "token_fraction": 1}, "steps: expected a number, got '1'"),
        (CELLS[1], {"steps": True, "token_fraction": 1}, "steps: expected a number, got True"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            table.append(cell, values)  # type: ignore[arg-type]
        assert one_line(error)
    table.close()
    assert (tmp_path / "rows.csv").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cells": [*CELLS, CELLS[0]]}, "is planned twice"),
        ({"cells": [("a,b", 8, 0)]}, "printable text"),
        ({"cells": [("a\nb", 8, 0)]}, "printable text"),
        ({"cells": [("", 8, 0)]}, "printable text"),
        ({"metrics": ()}, "metrics: expected distinct names"),
        ({"metrics": (("steps", "1"), ("steps", "1"))}, "metrics: expected distinct names"),
        ({"factors": ("workload", "value", "seed")}, "factors: expected distinct names"),
    ],
)
def test_wrong_plans_are_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_table(tmp_path / "out", **changes)
    assert one_line(error)
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="is not a folder"):
        open_table(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_full_disk_leaves_whole_cells_only(tmp_path: Path) -> None:
    class Full:
        """A file that takes five bytes of what it is given."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            return self.file.write(data[:5])

    table = open_table(tmp_path)
    table.append(CELLS[0], measured(CELLS[0]))
    before = (tmp_path / "rows.csv").read_bytes()
    table._file = Full(table._file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="only part of a cell"):
        table.append(CELLS[1], measured(CELLS[1]))
    table.close()
    assert (tmp_path / "rows.csv").read_bytes() == before


def test_a_run_that_fails_at_once_leaves_nothing_it_made(tmp_path):
    def fail(out):
        with pytest.raises(RuntimeError), open_table(out):
            raise RuntimeError

    fail(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note.txt").write_text("mine")
    fail(tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["note.txt"]


def test_a_folder_is_one_run_s_at_a_time(tmp_path: Path) -> None:
    with open_table(tmp_path / "out"):
        for resume in (False, True):
            with pytest.raises(ValueError, match="another run is writing there") as error:
                open_table(tmp_path / "out", resume=resume)
            one_line(error)
    open_table(tmp_path / "out").close()


def test_a_file_without_cells_is_begun_anew(tmp_path: Path) -> None:
    open_table(tmp_path).close()
    header = (tmp_path / "rows.csv").read_bytes()
    complete(tmp_path)
    assert (tmp_path / "rows.csv").read_bytes().startswith(header)
