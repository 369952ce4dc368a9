"""A kernel benchmark asks every contender the same, says what it leaves out, and keeps its rows."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from experiments import (
    attention_contenders,
    attention_inputs,
    kernel_figures,
    kernel_plan,
    tiling_search,
)
from experiments.attention_inputs import Shape
from experiments.kernel_plan import COPY, Cell, Settings
from paged_jax.measure import results
from pallas_kernels import problem, reference, tiling
from pallas_kernels.tiling import Tiling

SHAPE = Shape(
    batch=4,
    context=16,
    chunk=1,
    ragged=False,
    block_size=4,
    query_heads=4,
    kv_heads=2,
    width=16,
    dtype="float32",
)
SETTINGS = Settings(
    kernels=("decode", "prefill"),
    contenders=attention_contenders.CONTENDERS,
    backends=("xla",),
    lengths=("full", "ragged"),
    batches=(4,),
    prefill_batches=(2,),
    contexts=(16, 32),
    block_sizes=(4, 8),
    dtypes=("float32",),
    splits=("auto",),
    query_heads=4,
    kv_heads=2,
    width=16,
    chunk=0,
    platform="cpu",
)


def shape_of(**changes) -> Shape:
    return dataclasses.replace(SHAPE, **changes)


def test_ragged_rows_are_a_quarter_of_the_longest_on_average():
    lengths = shape_of(batch=32, context=1024, ragged=True).lengths()
    assert lengths.max() == 1024
    assert lengths.min() == 1
    assert abs(lengths.mean() / 1024 - 0.25) < 0.02
    assert shape_of(batch=1, ragged=True).lengths().tolist() == [16]


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_bytes_and_operations_are_counted(chunk):
    shape = shape_of(ragged=True, chunk=chunk, dtype="bfloat16")
    operations = moved = 0
    for length in shape.lengths().tolist():
        for position, head in itertools.product(range(length - chunk, length), range(4)):
            del head
            operations += (position + 1) * 2 * (16 + 16)
        moved += length * 2 * 2 * 16 * 2 + chunk * 2 * 4 * 16 * 2
    assert shape.operations() == operations
    assert shape.moved_bytes() == moved


@pytest.mark.parametrize("chunk", [1, 3])
def test_sets_share_no_block_and_differ_in_order_only(chunk):
    shape = shape_of(chunk=chunk)
    batch = attention_inputs.draw(shape, 3)
    assert batch.kv_NUKSD.shape == (3 * 4 * 4, 2, 2, 4, 16)
    for sets in (batch.paged, batch.contiguous):
        used = np.concatenate([one.table_BM for one in sets]).ravel()
        assert sorted(used) == list(range(48))
        assert (used.tolist() == list(range(48))) == (sets is batch.contiguous)
    for paged, contiguous in zip(batch.paged, batch.contiguous, strict=True):
        assert paged.q_THD is contiguous.q_THD
        assert paged.length_B is contiguous.length_B
    asked = problem_asked(batch.kv_NUKSD, batch.paged[0])
    assert asked == dataclasses.replace(attention_inputs.problem_of(shape), blocks=48)


def problem_asked(kv_NUKSD, one: attention_inputs.Inputs) -> problem.Problem:
    """What the op makes of the arguments."""
    plain = dict.fromkeys(
        ("scale", "window", "soft_cap", "sinks_H", "alibi_slope_H", "draft_mask_TQ")
    )
    options: dict[str, Any] = plain | {"causal": True, "k_scale": None, "v_scale": None}
    arrays = (one.table_BM, one.length_B, one.query_start_P)
    return problem.check(one.q_THD, kv_NUKSD, *arrays, **options)[1]


def test_sets_fill_the_bytes_asked_for():
    moved = SHAPE.moved_bytes()
    assert attention_inputs.set_count(SHAPE, 10 * moved, 16) == 10
    assert attention_inputs.set_count(SHAPE, 10 * moved + 1, 16) == 11
    assert attention_inputs.set_count(SHAPE, 100 * moved, 16) == 16
    assert attention_inputs.set_count(SHAPE, moved, 16) == 3


def answers(calls) -> list[np.ndarray]:
    function, arguments = calls
    return [np.asarray(out) for out in jax.jit(function)(*arguments)]


@pytest.mark.parametrize("ragged", [False, True])
def test_dense_gives_the_answers_of_contiguous_blocks(ragged):
    shape = shape_of(ragged=ragged)
    batch = attention_inputs.draw(shape, 2)
    ours = attention_contenders.attend(batch, shape, "contiguous", "reference", None)
    dense = attention_contenders.attend_dense(batch, shape)
    for one, other in zip(answers(ours), answers(dense), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_the_kernel_of_jax_gives_the_answers_of_paged_blocks(monkeypatch):
    shape = shape_of(ragged=True, block_size=8, context=64)
    batch = attention_inputs.draw(shape, 1)
    name = "jax.experimental.pallas.ops.gpu.paged_attention"
    kernel = attention_contenders.import_kernel(name)
    interpreted = functools.partial(kernel.paged_attention, interpret=True)
    monkeypatch.setattr(kernel, "paged_attention", interpreted)
    ours = attention_contenders.attend(batch, shape, "paged", "reference", None)
    theirs = attention_contenders.attend_jax(batch, shape, "gpu")
    np.testing.assert_allclose(answers(ours), answers(theirs), atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 16])
def test_the_kernels_of_jax_take_our_inputs_on_a_tpu(chunk, monkeypatch):
    ragged = attention_contenders.import_kernel(
        "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel"
    )
    # It looks its tiles up by the TPU's name, of which there is none here.
    monkeypatch.setattr(ragged, "get_tuned_block_sizes", lambda *problem: (4, 16))
    shape = shape_of(chunk=chunk, block_size=16, context=64, width=128, dtype="bfloat16")
    function, arguments = attention_contenders.attend_jax(
        attention_inputs.draw(shape, 1), shape, "tpu"
    )
    (out,) = jax.eval_shape(function, *arguments)
    assert out.shape == (4 * chunk, 4, 128)


def test_cells_of_a_shape_stand_together_behind_their_baseline():
    cells, left_out = kernel_plan.plan(SETTINGS)
    assert len(cells) == len(set(cells)) == 2 * 2 * (1 + 2 * 2) + 2 * (2 * 2)
    assert [cell[:2] for cell in cells[:3]] == [
        ("decode", "dense"),
        ("decode", "contiguous"),
        ("decode", "paged"),
    ]
    assert [cell.block_size for cell in cells[:5]] == [0, 4, 4, 8, 8]
    shapes = [SETTINGS.shape(cell) for cell in cells]
    changes = sum(one != other for one, other in itertools.pairwise(shapes))
    assert changes == len(set(shapes)) - 1
    assert [len(group) for group in kernel_plan.groups(cells)] == [5, 5, 5, 5, 4, 4]
    assert left_out == [
        "decode by torch needs a GPU and PyTorch that sees it",
        "decode by jax does not exist for a cpu",
        "prefill by dense decodes only",
        "prefill by torch needs a GPU and PyTorch that sees it",
        "prefill by jax does not exist for a cpu",
    ]


def test_nothing_to_time_is_an_error():
    nothing = dataclasses.replace(SETTINGS, kernels=("prefill",), contenders=("dense",))
    with pytest.raises(ValueError, match="nothing to time: prefill by dense decodes only"):
        kernel_plan.plan(nothing)


PROBLEM = attention_inputs.problem_of(SHAPE)
START = Tiling(queries=1, tokens=64, heads=1, splits=1, stages=2)


@pytest.fixture
def kernel(monkeypatch):
    """The reference as a kernel that refuses more than 4 splits and starts from ``START``."""
    monkeypatch.setattr(reference, "default_tiling", lambda problem: START)
    monkeypatch.setattr(
        reference,
        "refusal",
        lambda problem, tiling: "too many" if tiling.splits > 4 or tiling.queries > 1 else None,
    )
    return "reference"


def cost(tiling: Tiling) -> float:
    """Least at 8 splits of 256 tokens and 4 heads; stages do not matter."""
    return 1 + sum(
        abs(math.log2(getattr(tiling, field) / best))
        for field, best in (("splits", 8), ("tokens", 256), ("heads", 4))
    )


def test_search_finds_the_fastest_legal_tiling(kernel):
    asked = []

    def seconds_of(tiling):
        asked.append(tiling)
        return None if tiling.tokens == 1024 else cost(tiling)

    found = tiling_search.search(kernel, PROBLEM, seconds_of, budget_seconds=60)
    assert found is not None
    assert found.tiling == Tiling(queries=1, tokens=256, heads=4, splits=4, stages=2)
    assert (found.start_seconds, found.seconds) == (cost(START), 2)
    assert len(asked) == len(set(asked)) == found.tried
    assert max(tiling.splits for tiling in asked) == 4


def test_a_prefill_kernel_has_no_splits_to_find():
    prefill = dataclasses.replace(PROBLEM, decode=False)
    assert set(tiling_search.fields_of("mosaic_gpu", PROBLEM)) == set(tiling_search.FIELDS)
    assert "splits" not in tiling_search.fields_of("mosaic_gpu", prefill)
    assert set(tiling_search.fields_of("xla", prefill)) == set(tiling_search.FIELDS)


def test_search_stops_when_its_time_is_up(kernel):
    found = tiling_search.search(kernel, PROBLEM, cost, budget_seconds=0)
    assert found is not None
    assert (found.tiling, found.tried) == (START, 1)
    assert tiling_search.search(kernel, PROBLEM, lambda tiling: None, budget_seconds=9) is None


def test_what_is_found_is_what_the_op_reads(tmp_path, monkeypatch):
    larger = dataclasses.replace(PROBLEM, rows=64)
    tilings = [dataclasses.replace(START, splits=8), dataclasses.replace(START, tokens=256)]
    found = [
        tiling_search.Found(problem=one, tiling=best, seconds=1, start_seconds=2, tried=3)
        for one, best in zip((PROBLEM, larger), tilings, strict=True)
    ]
    path = tmp_path / "tuned" / tiling.file_name("Some Chip")
    tiling_search.write(path, tiling_search.entries("xla", found[:1]))
    tiling_search.write(path, tiling_search.entries("xla", found))
    entries = json.loads(path.read_text())
    assert len(entries) == 3
    monkeypatch.setattr(tiling, "_entries", lambda kind: entries)
    assert tiling.tuned("xla", PROBLEM, "Some Chip") == tilings[0]
    assert tiling.tuned("xla", larger, "Some Chip") == tilings[1]
    other = dataclasses.replace(PROBLEM, rows=3)
    assert tiling.tuned("xla", other, "Some Chip") == dataclasses.replace(tilings[1], splits=None)
    assert tiling.tuned("xla", dataclasses.replace(PROBLEM, width=8), "Some Chip") is None


def bench_of(
    tmp_path,
):
    """Results of all contenders, each twice as slow as the one before, without timing any."""
    cells = [
        Cell("decode", who, backend, lengths, batch, context, block_size, "float32", splits)
        for lengths, batch, context in itertools.product(("full", "ragged"), (8, 32), (256, 1024))
        for who, backend, block_size, splits in (
            ("dense", "-", 0, "-"),
            ("contiguous", "xla", 16, "auto"),
            ("paged", "xla", 16, "auto"),
            ("contiguous", "xla", 64, "auto"),
            ("paged", "xla", 64, "auto"),
        )
    ]
    names = ["microseconds", "fastest_microseconds", "gigabytes_per_second", "copy_fraction"]
    names.append("teraflops")
    table = results.Table.open(
        tmp_path / "bench",
        factors=Cell._fields,
        metrics=[(name, "1") for name in names],
        cells=[COPY, *cells],
        run={},
    )
    with table:
        for place, cell in enumerate([COPY, *cells]):
            value = cell.batch * cell.context / 64 * 2 ** ((place - 1) % 5 / 4) + 1
            value *= 0.3 if cell.lengths == "ragged" else 1
            table.append(cell, dict.fromkeys(names, value))
    return tmp_path / "bench"


def test_figures_and_table_come_from_rows_alone(tmp_path):
    out = bench_of(tmp_path)
    names = ["decode_latency.png", "block_size.png"]
    assert [path.name for path in kernel_figures.draw(out)] == names
    first = [(out / name).read_bytes() for name in names]
    kernel_figures.draw(out)
    assert [(out / name).read_bytes() for name in names] == first
    lines = kernel_figures.text(kernel_figures.read(out)).splitlines()
    assert len(lines) == 2 + 40
    ratios = [line.split()[-2:] for line in lines if " paged " in line]
    bench = kernel_figures.read(out)
    cell = next(cell for cell in bench if cell.contender == "paged")
    paged, dense, contiguous = (
        bench[other]["microseconds"]
        for other in (
            cell,
            cell._replace(contender="dense", backend="-", splits="-", block_size=0),
            cell._replace(contender="contiguous"),
        )
    )
    assert ratios[0] == [f"{paged / dense:.2f}", f"{paged / contiguous:.2f}"]


def test_axes_have_names_and_units(tmp_path):
    bench = kernel_figures.read(bench_of(tmp_path))
    figures = dict(kernel_figures.figures_of(bench))
    (first, second) = figures["decode_latency"].axes
    assert first.get_ylabel() == "Latency of a call (µs)"
    assert [axes.get_xlabel() for axes in (first, second)] == ["Context (tokens)"] * 2
    assert second.get_title() == "decode, blocks of 16 slots, 32 rows"
    (legend,) = figures["decode_latency"].legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == len(set(labels)) == 6
    assert "paged, ragged" in labels


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "experiments.kernel_bench", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


TINY = (
    *("--batches=2", "--prefill_batches=1", "--contexts=8", "--block_sizes=4", "--megabytes=1"),
    *("--query_heads=2", "--kv_heads=1", "--width=8", "--repeats=1", "--sets=1"),
)


def test_command_times_what_a_cpu_can(tmp_path):
    out = tmp_path / "out"
    done = command(*TINY, "--lengths=full", "--contenders=dense,paged,jax", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert "left out: decode by jax does not exist for a cpu" in done.stdout
    cells = {(row["kernel"], row["contender"]) for row in results.read(out)}
    assert cells == {
        ("copy", "copy"),
        ("decode", "dense"),
        ("decode", "paged"),
        ("prefill", "paged"),
    }
    assert all(row["value"] > 0 for row in results.read(out) if row["metric"] == "microseconds")
    assert (out / "decode_latency.png").exists()


def test_search_command_leaves_rows_and_a_tuned_file(tmp_path):
    out = tmp_path / "out"
    done = command(*TINY, "--kernels=decode", "--search", "--search_seconds=1", f"--out={out}")
    assert done.returncode == 0, done.stderr
    values = {row["metric"]: row["value"] for row in results.read(out)}
    assert 0 < values["best_microseconds"] <= values["default_microseconds"]
    entries = json.loads((out / "cpu.json").read_text())
    assert {entry["backend"] for entry in entries} == {"xla"}
    assert Tiling(**entries[0]["tiling"]).tokens == values["tokens"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--backends=mosaic_gpu",
            "--backends: mosaic_gpu needs a gpu and would be interpreted on a cpu:"
            " an interpreter's time is no speed",
        ),
        ("--splits=auto,0", "--splits: expected whole numbers from 1, got 0"),
        ("--query_heads=3", "--query_heads: expected a multiple of --kv_heads=2, got 3"),
    ],
)
def test_wrong_flags_are_named(flag, message, tmp_path):
    done = command(flag, f"--out={tmp_path / 'out'}")
    assert (done.returncode, done.stderr) == (1, f"error: {message}\n")
    assert not (tmp_path / "out").exists()
