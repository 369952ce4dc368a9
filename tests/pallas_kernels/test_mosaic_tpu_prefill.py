"""The TPU prefill kernel, called by itself: packed, in the interpreter, lowered, and refusing."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import problem as problems
from pallas_kernels.mosaic_tpu import packing, parts, prefill, prefill_copies
from pallas_kernels.problem import Operands, Problem
from tests.support import attention, attention_cases, backends
from tests.support.attention import Call, Result

CASES = {
    case.name: case
    for case in attention_cases.exact_cases("bfloat16")
    if "query_start_P" in case.call and not case.splits and case.call["kv_NUKSD"].shape[3] >= 8
}
# Tiles of 32 tokens: an empty row, rows of no length and of one query, rows of several tiles, and
# context of steps that all see, that some see, and that hold the length's end.
RAGGED: Call = {
    "lengths": [90, 7, 0, 137, 12, 310],
    "counts": [5, 0, 2, 1, 12, 70],
    "padding": 4,
    "dtype": "bfloat16",
}
SMALL = {"queries": 32, "tokens": 128}


def normal(call: Call) -> tuple[Operands, Problem]:
    return problems.check(**call)


def run(call: Call, *, cores: int = 1, dma: Any = "on_wait", **tiling: int) -> Result:
    """Results of a call; a race is a ``RuntimeError``."""
    operands, problem = normal(call)
    chosen = dataclasses.replace(prefill.default_tiling(problem), **(SMALL | tiling))
    assert prefill.refusal(problem, chosen) is None
    interpret = pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=cores, dma_execution_mode=dma
    )
    with backends.race_free():
        out_THD, lse_TH = jax.jit(
            lambda operands: prefill.attend(operands, problem, chosen, interpret)
        )(operands)
        return np.asarray(out_THD), np.asarray(lse_TH)


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_its_answer(name):
    case = CASES[name]
    out_THD, lse_TH = run(case.call)
    if case.out_TH is None:
        assert not attention.faults((out_THD, lse_TH), case.call)
        return
    expected_THD = np.broadcast_to(np.array(case.out_TH)[..., None], out_THD.shape)
    np.testing.assert_allclose(out_THD.astype(np.float64), expected_THD, rtol=2**-8)
    np.testing.assert_allclose(lse_TH, case.lse_TH, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32", "width": 80, "query_heads": 5, "kv_heads": 1},
        {"window": 50, "block_size": 8, "sinks": True},
        {"causal": False, "window": 40, "alibi": True},
        {"draft": True, "soft_cap": 3.0, "width": 192, "block_size": 48, "tokens": 384},
        {"cache_dtype": "int8", "k_scale": "head", "v_scale": "slot", "window": 100},
        {"cache_dtype": "float8_e4m3fn", "k_scale": "slot", "v_scale": "scalar", "draft": True},
    ],
    ids=str,
)
def test_ragged_rows_are_the_definition(changes):
    changes = dict(changes)
    tiling = {"tokens": changes.pop("tokens")} if "tokens" in changes else {}
    call = attention.problem(3, **(RAGGED | changes))
    assert not attention.faults(run(call, **tiling), call)


def test_two_cores_take_tiles_in_turn(monkeypatch):
    monkeypatch.setattr(parts, "cores", lambda: 2)
    call = attention.problem(4, **RAGGED)
    assert not attention.faults(run(call, cores=2), call)


def test_a_table_too_large_for_a_launch_takes_several(monkeypatch):
    call = attention.problem(5, sinks=True, **RAGGED)
    row = call["table_BM"].shape[1] + len(packing.Work._fields)
    monkeypatch.setattr(parts, "TABLE_CELLS", 3 * row)
    assert not attention.faults(run(call), call)


@pytest.mark.parametrize("forgotten", ["wait_keys", "wait_results"])
def test_a_forgotten_wait_is_a_race(monkeypatch, forgotten):
    """Positive control."""
    monkeypatch.setattr(prefill_copies.Copies, forgotten, lambda *_: None)
    call = attention.problem(6, lengths=[150], counts=[70], dtype="bfloat16")
    try:
        with pytest.raises(RuntimeError, match="RACE DETECTED"):
            run(call, dma="eager")
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_a_forgotten_wait_leaves_nan(monkeypatch):
    """Positive control, with copies as late as they may be."""
    monkeypatch.setattr(prefill_copies.Copies, "wait_queries", lambda *_: None)
    call = attention.problem(6, lengths=[150], counts=[70], dtype="bfloat16")
    assert any("error nan" in fault for fault in attention.faults(run(call), call))


@pytest.mark.parametrize("group", [1, 3, 8])
def test_tiles_are_packed_apart(group):
    """Every token has a place of its own, in pieces of whole register tiles that no tile shares."""
    call = attention.problem(7, query_heads=group, kv_heads=1, **RAGGED)
    operands, problem = normal(call)
    size = packing.piece_tokens(problem) * 2
    work = packing.cut(operands, problem, size, cores=2)
    places = packing.place(work, problem, size)
    unit = packing.piece_tokens(problem)
    assert unit * group % packing.REGISTER_ROWS == 0
    assert len(work.count_I) % 2 == 0
    assert not np.asarray(work.count_I)[-2:].any()
    owners: dict[int, int] = {}
    taken = set[int]()
    for token, (first, last) in _tokens(call):
        assert places.owned_T[token] == (last > 0)
        if last:
            tile, place = int(places.tile_T[token]), int(places.place_T[token])
            assert work.position_I[tile] + places.nth_T[token] == first
            assert owners.setdefault(place // unit, tile) == tile
            assert places.token_Z[place] == token
            taken.add(place)
    assert len(taken) == int(np.asarray(places.owned_T).sum())
    assert int(work.piece_I[-1]) * unit + size <= len(places.token_Z)


def _tokens(call: Call) -> Any:
    """Every token with its place in its row and the row's length, 0 where nobody's."""
    token = 0
    rows = itertools.pairwise(call["query_start_P"])
    for (begin, end), length in zip(rows, call["length_B"], strict=True):
        for token in range(begin, end):
            yield token, (length - end + token, length)
    for padding in range(token + 1, len(call["q_THD"])):
        yield padding, (0, 0)


def test_a_tile_reads_what_its_queries_see():
    """One row of 310 tokens and 70 queries, window 50, in tiles of 32."""
    call = attention.problem(8, lengths=[310], counts=[70], window=50)
    work = packing.cut(*normal(call), 32, cores=1)
    assert work.begin_I[:3].tolist() == [240 - 49, 272 - 49, 304 - 49]
    assert work.end_I[:3].tolist() == [272, 304, 310]
    assert work.count_I.tolist() == [32, 32, 6, 0]


SHAPES: list[dict[str, Any]] = [
    *({"block_size": size} for size in (8, 16, 48, 256)),
    *({"block_size": size, "cache_dtype": "int8"} for size in (8, 32)),
    *({"width": width} for width in (64, 80, 256)),
    *({"query_heads": 8 * group} for group in (1, 3, 16)),
    {"kv_heads": 32, "query_heads": 32, "dtype": "float32"},
    {"kv_heads": 1, "query_heads": 71, "window": 512, "soft_cap": 30.0},
    {"sinks": True, "alibi": True, "draft": 64, "row_blocks": 1 << 16},
    {"cache_dtype": "float8_e5m2", "k_scale": "slot", "v_scale": "slot", "dtype": "float32"},
]


def sized(changes: dict[str, Any]) -> Problem:
    """A prefill problem of common sizes."""
    sizes: dict[str, Any] = {"query_heads": 32, "kv_heads": 8, "width": 128, "block_size": 16}
    sizes |= {"rows": 8, "queries": 2048, "blocks": 4096, "row_blocks": 64, "scale": 0.1} | changes
    sizes.setdefault("dtype", "bfloat16")
    sizes.setdefault("cache_dtype", sizes["dtype"])
    if sizes["cache_dtype"] in problems.QUANTISED:
        sizes = {"k_scale": "head", "v_scale": "head"} | sizes
    return Problem(decode=False, **sizes)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_lowers_for_tpu(changes):
    problem = sized(changes)
    tiling = prefill.default_tiling(problem)
    assert prefill.refusal(problem, tiling) is None
    jax.jit(lambda operands: prefill.attend(operands, problem, tiling, None)).trace(
        shapes(problem)
    ).lower(lowering_platforms=("tpu",))


def shapes(problem: Problem) -> Operands:
    """Operands of a problem without their values."""
    B, T, H, K = problem.rows, problem.queries, problem.query_heads, problem.kv_heads
    N, S, D = problem.blocks, problem.block_size, problem.width

    def array(used: Any, dtype: str, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype) if used else None

    def scale(kind: str | None) -> Any:
        return array(kind, "float32", *((K,) if kind == "head" else (N, K, S)))

    return Operands(
        q_THD=array(True, problem.dtype, T, H, D),
        kv_NUKSD=array(True, problem.cache_dtype, N, 2, K, S, D),
        table_BM=array(True, "int32", B, problem.row_blocks),
        length_B=array(True, "int32", B),
        query_start_P=array(True, "int32", B + 1),
        sinks_H=array(problem.sinks, "float32", H),
        alibi_slope_H=array(problem.alibi, "float32", H),
        draft_mask_TQ=array(problem.draft, "bool", T, problem.draft or 0),
        k_scale=scale(problem.k_scale),
        v_scale=scale(problem.v_scale),
    )


@pytest.mark.parametrize(
    ("changes", "tiling", "says"),
    [
        ({}, {"queries": 12}, r"tiling.queries: expected a multiple of 8, got 12"),
        ({"block_size": 48}, {"tokens": 128}, r"tiling.tokens: .* multiple of 384, got 128"),
        ({}, {"heads": 4}, r"tiling.heads: prefill has 8, got 4"),
        ({}, {"splits": 2}, r"tiling.splits: prefill has 1, got 2"),
        ({}, {"stages": 3}, r"tiling.stages: prefill has 2, got 3"),
        ({}, {"queries": 1024}, r"tiling: 1024 queries and 512 tokens need \d+ MiB of VMEM, .* 48"),
    ],
)
def test_what_it_cannot_serve_is_named(changes, tiling, says):
    problem = sized(changes)
    chosen = dataclasses.replace(prefill.default_tiling(problem), **tiling)
    assert re.fullmatch(says, prefill.refusal(problem, chosen) or "")
