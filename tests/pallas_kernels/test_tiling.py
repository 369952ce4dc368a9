"""Tile sizes: what the caller sets comes before what was tuned, and that before the formula."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pallas_kernels import ops, tiling
from pallas_kernels.problem import Problem
from pallas_kernels.tiling import Tiling

PROBLEM = Problem(
    rows=2,
    queries=2,
    query_heads=4,
    kv_heads=2,
    width=64,
    block_size=16,
    blocks=8,
    row_blocks=4,
    dtype="float32",
    cache_dtype="float32",
    decode=True,
    scale=0.125,
)
FORMULA = Tiling(queries=1, tokens=128, heads=2, splits=1, stages=2)
ENTRIES = [
    {"backend": "xla", "when": {"block_size": 8}, "tiling": {"tokens": 8}},
    {"backend": "mosaic_tpu", "when": {}, "tiling": {"tokens": 256}},
    {"backend": "xla", "when": {"block_size": 16, "decode": True}, "tiling": {"tokens": 32}},
    {"backend": "xla", "when": {}, "tiling": {"tokens": 64}},
]


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8"])
def test_sizes_are_whole_numbers_from_one(value):
    with pytest.raises(ValueError, match=r"tiling\.splits: expected a whole number from 1, got"):
        Tiling(splits=value)


def test_open_fields_come_from_the_default():
    assert tiling.fill(None, FORMULA) is FORMULA
    assert tiling.fill(Tiling(splits=3), FORMULA) == dataclasses.replace(FORMULA, splits=3)
    with pytest.raises(ValueError, match="tiling: expected a Tiling, got dict"):
        tiling.fill({"splits": 3}, FORMULA)  # type: ignore[arg-type]


def test_the_first_tuned_entry_that_holds_counts(monkeypatch):
    monkeypatch.setattr(tiling, "_entries", lambda kind: ENTRIES if kind == "Chip 1" else [])
    assert tiling.tuned("xla", PROBLEM, "Chip 1") == Tiling(tokens=32)
    prefill = dataclasses.replace(PROBLEM, decode=False)
    assert tiling.tuned("xla", prefill, "Chip 1") == Tiling(tokens=64)
    assert tiling.tuned("mosaic_gpu", PROBLEM, "Chip 1") is None
    assert tiling.tuned("xla", PROBLEM, "Chip 2") is None


def test_a_device_kind_names_a_file(tmp_path, monkeypatch):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "chip_1.json").write_text(json.dumps(ENTRIES))
    monkeypatch.setattr(tiling.importlib.resources, "files", lambda package: tmp_path)
    tiling._entries.cache_clear()
    try:
        assert tiling.tuned("xla", PROBLEM, "Chip 1") == Tiling(tokens=32)
        assert tiling.tuned("xla", PROBLEM, "Chip 2") is None
    finally:
        tiling._entries.cache_clear()


def test_committed_entries_name_what_exists():
    fields = {field.name for field in dataclasses.fields(Problem)}
    for path in (Path(tiling.__file__).parent / "tuned").glob("*.json"):
        for entry in json.loads(path.read_text()):
            assert set(entry) == {"backend", "when", "tiling"}, path
            assert entry["backend"] in ops.BACKENDS, path
            assert set(entry["when"]) <= fields, path
            Tiling(**entry["tiling"])
