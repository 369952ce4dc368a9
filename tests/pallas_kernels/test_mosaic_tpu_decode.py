"""The TPU decode kernel: in the interpreter with races an error, lowered, and refusing."""

from __future__ import annotations

import dataclasses
import faulthandler
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu
from pallas_kernels import problem as problems
from pallas_kernels.mosaic_tpu import decode, decode_softmax, parts
from pallas_kernels.problem import Operands, Problem
from tests.support import attention, backends
from tests.support.attention import Call, Result

# Tiles of 128 tokens: rows of none, of a part of one, of one, of several, and of one token more.
ROWS: Call = {"lengths": [0, 5, 128, 0, 300, 129, 0], "dtype": "bfloat16", "width": 128}
TILE = {"tokens": 128}
SECONDS = 300
PROBLEM = Problem(
    rows=2,
    queries=2,
    query_heads=32,
    kv_heads=8,
    width=128,
    block_size=16,
    blocks=64,
    row_blocks=8,
    dtype="bfloat16",
    cache_dtype="bfloat16",
    decode=True,
    scale=0.1,
)


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """A copy that is waited for and never started hangs where no exception reaches."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def run(call: Call, *, cores: int = 1, **tiling: int) -> Result:
    """Results of a call; a race is a ``RuntimeError``."""
    operands, problem = problems.check(**call)
    chosen = dataclasses.replace(decode.default_tiling(problem), **(TILE | tiling))
    assert decode.refusal(problem, chosen) is None
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
    attend = jax.jit(lambda operands: decode.attend(operands, problem, chosen, interpret))
    with backends.race_free():
        out_THD, lse_TH = attend(operands)
        return np.asarray(out_THD), np.asarray(lse_TH)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float32", "stages": 3, "query_heads": 6, "kv_heads": 3, "block_size": 8},
        {"window": 40, "sinks": True, "query_heads": 10, "width": 64},
        {"soft_cap": 3.0, "alibi": True, "width": 192, "block_size": 48, "tokens": 384},
        {"cache_dtype": "int8", "k_scale": "slot", "v_scale": "slot", "window": 100},
        {"cache_dtype": "float8_e4m3fn", "k_scale": "head", "v_scale": "head", "kv_heads": 1},
    ],
    ids=str,
)
def test_rows_are_the_definition(changes):
    tiling = {name: changes[name] for name in ("stages", "tokens") if name in changes}
    rest = {name: value for name, value in changes.items() if name not in tiling}
    call = attention.problem(3, **(ROWS | rest))
    assert not attention.faults(run(call, **tiling), call)


def test_two_cores_take_rows_in_turn(monkeypatch):
    """Seven rows, so that one core has an empty row more."""
    monkeypatch.setattr(parts, "cores", lambda: 2)
    call = attention.problem(4, **ROWS)
    assert not attention.faults(run(call, cores=2), call)


def test_a_table_too_large_for_a_launch_takes_several(monkeypatch):
    call = attention.problem(5, sinks=True, **ROWS)
    monkeypatch.setattr(parts, "TABLE_CELLS", 4 * (call["table_BM"].shape[1] + 1))
    assert not attention.faults(run(call), call)


def test_what_nobody_sees_is_not_fetched(monkeypatch):
    """Ids outside the pool, which are left as they are here, stop the interpreter where used."""
    monkeypatch.setattr(parts, "flat_table", lambda table_BM, problem: table_BM.reshape(-1))
    call = attention.problem(6, window=40, **ROWS)
    blocks, size = call["kv_NUKSD"].shape[0], call["kv_NUKSD"].shape[3]
    for row, length in enumerate(call["length_B"]):
        call["table_BM"][row, -(-length // size) :] = blocks
        call["table_BM"][row, : max(length - 40, 0) // size] = blocks
    out_THD, _ = run(call)
    assert np.isfinite(out_THD.astype(np.float32)).all()


def test_a_used_id_outside_the_pool_stops_the_interpreter(monkeypatch):
    """Positive control of the test above."""
    monkeypatch.setattr(parts, "flat_table", lambda table_BM, problem: table_BM.reshape(-1))
    call = attention.problem(6, lengths=[20], dtype="bfloat16", width=128)
    call["table_BM"][0, 1] = len(call["kv_NUKSD"])
    try:
        with pytest.raises(Exception, match=r"[Oo]ut[- ]of[- ]bounds"):
            run(call)
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def test_a_forgotten_wait_is_reported(monkeypatch):
    """Positive control: as a race, or as memory that nobody wrote."""
    monkeypatch.setattr(parts.Fetch, "wait", lambda *_: None)
    call = attention.problem(7, lengths=[20, 150], dtype="bfloat16", width=128)
    try:
        found = attention.faults(run(call), call)
    except Exception as error:
        found = [str(error)]
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert found


def test_values_that_nobody_zeroed_are_reported(monkeypatch):
    """Positive control: what a stage holds past a row's length gets in as 0 * NaN."""
    monkeypatch.setattr(parts.Fetch, "zero_values", lambda *_: None)
    call = attention.problem(8, lengths=[20], dtype="bfloat16", width=128)
    assert attention.faults(run(call), call)


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 256),
        ({"kv_heads": 32}, 128),
        ({"kv_heads": 1}, 1024),
        ({"cache_dtype": "int8"}, 512),
        ({"width": 64}, 256),
        ({"block_size": 48}, 384),
    ],
    ids=str,
)
def test_default_tiles_are_a_mebibyte_of_whole_blocks(changes, tokens):
    assert decode.default_tiling(dataclasses.replace(PROBLEM, **changes)).tokens == tokens


@pytest.mark.parametrize(
    ("changes", "tiling", "named"),
    [
        ({"dtype": "float16"}, {}, "q_THD: expected bfloat16 or float32, got float16"),
        ({"cache_dtype": "float64"}, {}, "kv_NUKSD: expected one of .*, got float64"),
        ({"block_size": 4}, {}, "kv_NUKSD: .* multiple of 8, got 4"),
        ({"row_blocks": 1 << 18}, {}, "table_BM: a row of 262144 blocks, SMEM holds 131072"),
        ({}, {"tokens": 64}, "tiling.tokens: expected a multiple of 128, got 64"),
        ({"block_size": 48}, {"tokens": 128}, "tiling.tokens: expected a multiple of 384, got 128"),
        ({}, {"queries": 2}, "tiling.queries: decode has 1, got 2"),
        ({}, {"splits": 2}, "tiling.splits: decode has 1, got 2"),
        ({}, {"heads": 4}, "tiling.heads: decode has 8, got 4"),
        ({}, {"stages": 1}, "tiling.stages: expected at least 2, got 1"),
        ({}, {"tokens": 8192}, "tiling: 2 stages of 8192 tokens are 64 MiB, .* 32"),
    ],
    ids=str,
)
def test_what_it_cannot_serve_it_names(changes, tiling, named):
    asked = dataclasses.replace(PROBLEM, **changes)
    chosen = dataclasses.replace(mosaic_tpu.default_tiling(asked), **tiling)
    refusal = mosaic_tpu.refusal(asked, chosen)
    assert refusal is not None
    assert pytest.RaisesExc(ValueError, match=f"^{named}$").matches(ValueError(refusal))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 8, "query_heads": 8},
        {"block_size": 256, "query_heads": 128, "window": 100, "soft_cap": 30.0},
        {"dtype": "float32", "cache_dtype": "float32", "width": 64},
        {"cache_dtype": "int8", "k_scale": "slot", "v_scale": "slot", "sinks": True},
        {"cache_dtype": "float8_e5m2", "k_scale": "head", "v_scale": "head", "alibi": True},
        {"kv_heads": 1, "width": 256, "rows": 9000, "queries": 9000},
    ],
    ids=str,
)
def test_it_lowers_for_a_tpu(changes):
    assert "tpu_custom_call" in lowered(dataclasses.replace(PROBLEM, **changes))


def test_it_lowers_where_python_numbers_are_of_64_bits():
    with jax.enable_x64(True):
        assert "tpu_custom_call" in lowered(dataclasses.replace(PROBLEM, sinks=True, window=9))


def lowered(problem: Problem) -> str:
    tiling = mosaic_tpu.default_tiling(problem)
    assert mosaic_tpu.refusal(problem, tiling) is None

    def shape(sizes: tuple[int, ...], dtype: str, used: Any = True) -> Any:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype)) if used else None

    B, H, D = problem.rows, problem.query_heads, problem.width
    N, K, S = problem.blocks, problem.kv_heads, problem.block_size
    scale = {"head": (K,), "slot": (N, K, S), None: ()}
    operands = Operands(
        q_THD=shape((B, H, D), problem.dtype),
        kv_NUKSD=shape((N, 2, K, S, D), problem.cache_dtype),
        table_BM=shape((B, problem.row_blocks), "int32"),
        length_B=shape((B,), "int32"),
        sinks_H=shape((H,), "float32", problem.sinks),
        alibi_slope_H=shape((H,), "float32", problem.alibi),
        k_scale=shape(scale[problem.k_scale], "float32", problem.k_scale),
        v_scale=shape(scale[problem.v_scale], "float32", problem.v_scale),
    )
    attend = jax.jit(lambda operands: mosaic_tpu.attend(operands, problem, tiling, None))
    return attend.trace(operands).lower(lowering_platforms=("tpu",)).as_text()


def test_heads_go_in_pairs_where_they_fit_a_unit():
    pairs = decode_softmax.products(dataclasses.replace(PROBLEM, query_heads=16, kv_heads=4))
    assert [(list(heads), rows) for heads, rows in pairs] == [
        ([0, 1], slice(0, 8)),
        ([2, 3], slice(8, 16)),
    ]
    single = decode_softmax.products(dataclasses.replace(PROBLEM, query_heads=6, kv_heads=3))
    assert [(list(heads), rows) for heads, rows in single] == [
        ([0], slice(0, 8)),
        ([1], slice(8, 16)),
        ([2], slice(16, 24)),
    ]
