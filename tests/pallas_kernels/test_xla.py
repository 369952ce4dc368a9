"""The xla back end: right in every shape and option, memory of a few tiles, any platform."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import problem as problems
from pallas_kernels import xla
from pallas_kernels.ops import paged_attention
from pallas_kernels.problem import Problem
from pallas_kernels.tiling import Tiling
from tests.support import attention, backends

RAGGED: dict[str, Any] = {"lengths": [20, 0, 7, 13], "counts": [3, 0, 7, 1], "padding": 2}
SMALL: dict[str, Any] = {"width": 8, "block_size": 4}

# Settings of a call, and a tiling that cuts it into several tiles.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode": ({"lengths": [9, 0, 33]}, {"tokens": 8, "splits": 2}),
    "full tiles": (
        {"lengths": [16, 32, 8], "counts": [4, 9, 8]},
        {"tokens": 8, "queries": 4, "splits": 16},
    ),
    "block size 1, odd width": ({"lengths": [5, 2], "block_size": 1, "width": 7}, {"tokens": 3}),
    "block size 5, group 3": (
        {**RAGGED, "block_size": 5, "query_heads": 9, "kv_heads": 3},
        {"queries": 2, "tokens": 10},
    ),
    "window": ({**RAGGED, "window": 5}, {"queries": 2, "tokens": 4, "splits": 2}),
    "window, decode": ({"lengths": [9, 0, 33], "window": 6}, {"tokens": 8}),
    "not causal, window": ({**RAGGED, "causal": False, "window": 3}, {"queries": 4, "tokens": 4}),
    "all biases": (
        {**RAGGED, "soft_cap": 2.0, "sinks": True, "alibi": True},
        {"queries": 4, "tokens": 8, "splits": 1},
    ),
    "draft": ({**RAGGED, "draft": True, "poison": False}, {"queries": 2, "tokens": 4}),
    "bf16 queries, f32 cache": (
        {**RAGGED, "dtype": "bfloat16", "cache_dtype": "float32"},
        {"queries": 2, "tokens": 4},
    ),
    "int8": (
        {**RAGGED, "cache_dtype": "int8", "k_scale": "slot", "v_scale": "head"},
        {"queries": 2, "tokens": 4},
    ),
    "e4m3": (
        {**RAGGED, "cache_dtype": "float8_e4m3fn", "k_scale": "scalar", "v_scale": "slot"},
        {"queries": 2, "tokens": 4},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_float64(name):
    settings, tiling = CALLS[name]
    call = attention.problem(1, **(SMALL | settings))
    assert not attention.faults(backends.run(call, "xla", **tiling), call)


def test_computes_in_f64_where_an_operand_is():
    call = attention.problem(1, **SMALL, **RAGGED, dtype="float64", soft_cap=3.0, sinks=True)
    with jax.enable_x64(True):
        out_THD, lse_TH = backends.run(call, "xla", queries=2, tokens=4)
    expected_THD, expected_TH = attention.attend(**call)
    assert out_THD.dtype == np.float64
    np.testing.assert_allclose(out_THD, expected_THD, rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse_TH, expected_TH, rtol=1e-6)


def test_vmap_of_the_back_end_itself():
    call = attention.problem(2, **SMALL, **RAGGED)
    operands, problem = checked(call)
    tiling = dataclasses.replace(xla.default_tiling(problem), queries=2, tokens=8, splits=2)
    stretched = jnp.stack([operands.q_THD, 2 * operands.q_THD])

    def attend(q_THD: jax.Array) -> Any:
        return xla.attend(operands._replace(q_THD=q_THD), problem, tiling, None)

    both = jax.jit(jax.vmap(attend))(stretched)
    for nth, factor in enumerate((1, 2)):
        asked = call | {"q_THD": factor * call["q_THD"]}
        assert not attention.faults([part[nth] for part in both], asked)


def checked(call: attention.Call) -> tuple[problems.Operands, Problem]:
    named: attention.Call = dict.fromkeys(
        ("scale", "window", "soft_cap", "sinks_H", "alibi_slope_H", "draft_mask_TQ")
    )
    named |= {"causal": True, "k_scale": None, "v_scale": None}
    return problems.check(**(named | call))


BLOCKS = 65_536


def shapes(
    row_blocks: int, dtype: str, cache_dtype: str, queries: int | None = None
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of a call over a pool of 8 M numbers in blocks of 4 tokens."""
    arrays = {
        "q_THD": ((queries or 4, 4, 8), dtype),
        "kv_NUKSD": ((BLOCKS, 2, 2, 4, 8), cache_dtype),
        "table_BM": ((4, row_blocks), "int32"),
        "length_B": ((4,), "int32"),
    } | ({"query_start_P": ((5,), "int32")} if queries else {})
    return tuple(jax.ShapeDtypeStruct(*array) for array in arrays.values())


def compiled(row_blocks: int, dtype: str, cache_dtype: str, queries: int | None) -> Any:
    scale = 1.0 if cache_dtype in problems.QUANTISED else None

    def attend(*arrays: jax.Array) -> Any:
        return paged_attention(*arrays, backend="xla", k_scale=scale, v_scale=scale)

    return jax.jit(attend).lower(*shapes(row_blocks, dtype, cache_dtype, queries)).compile()


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "queries"),
    [
        ("float32", "float32", None),
        ("bfloat16", "bfloat16", 64),
        ("bfloat16", "float8_e4m3fn", None),
    ],
)
def test_memory_is_that_of_some_tiles(dtype, cache_dtype, queries):
    """Neither the table's width nor the pool shows in it, in none of the types."""
    short, long = (
        compiled(row_blocks, dtype, cache_dtype, queries).memory_analysis().temp_size_in_bytes
        for row_blocks in (1024, 4096)
    )
    assert short == long < 3 * 2**20


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads what XLA makes for a CPU")
def test_a_decode_step_on_a_cpu_copies_whole_rows_and_transposes_nothing():
    """What makes it fast: a gather's loop over [S, D] of a block and head, into dense products."""
    text = compiled(64, "float32", "float32", None).as_text()
    pairs, heads, blocks, row = 8, 2, 32, 4 * 8
    assert text.count(f" = f32[{pairs},{heads},{blocks},{row}]{{3,2,1,0}} fusion(") == 2
    assert " transpose(" not in text


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("queries", [None, 64], ids=["decode", "ragged"])
def test_lowers_for_every_platform(platform, queries):
    def attend(*arrays: jax.Array) -> Any:
        return paged_attention(*arrays, backend="xla", window=9, return_lse=True)

    traced = jax.jit(attend).trace(*shapes(8, "bfloat16", "bfloat16", queries))
    assert "while" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("tiling", "message"),
    [
        (Tiling(tokens=6), "tiling.tokens: expected a multiple of the block size 4, got 6"),
        (Tiling(heads=1), "tiling.heads: expected all 2 heads, got 1"),
        (Tiling(stages=2), "tiling.stages: expected 1, got 2"),
    ],
)
def test_refuses_tilings_it_has_not(tiling, message):
    call = attention.problem(1, lengths=[5], **SMALL)
    with pytest.raises(ValueError, match=message):
        paged_attention(**call, backend="xla", tiling=tiling)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 128, 32)),
        ({"row_blocks": 3}, (1, 48, 32)),
        ({"block_size": 512}, (1, 512, 8)),
        ({"decode": False, "queries": 32 * 40}, (64, 256, 4)),
        ({"rows": 1, "queries": 1, "row_blocks": 12}, (1, 128, 2)),
    ],
    ids=["decode", "short", "large blocks", "prefill", "two tiles"],
)
def test_tiles_of_a_default_suit_the_call(changes, expected):
    _, problem = checked(attention.problem(1, **RAGGED))
    sizes = {"rows": 32, "queries": 32, "row_blocks": 64, "query_heads": 8, "decode": True}
    tiling = xla.default_tiling(dataclasses.replace(problem, **(sizes | changes)))
    assert (tiling.queries, tiling.tokens, tiling.splits) == expected
    assert xla.refusal(problem, tiling) is None
