"""The Hopper decode kernel, called by itself: in the interpreter, lowered, and refusing."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import problem as problems
from pallas_kernels.mosaic_gpu import backend, decode_plan
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling
from tests.support import attention, backends
from tests.support.attention import Call, Result

# More steps than stages and a part of one, a row of nothing, less than a step, whole steps.
LENGTHS = [300, 0, 5, 128]
ROWS: dict[str, Any] = {"lengths": LENGTHS, "query_heads": 2, "kv_heads": 1, "dtype": "bfloat16"}
SIZES: dict[str, Any] = {
    "rows": 4,
    "queries": 4,
    "query_heads": 8,
    "kv_heads": 2,
    "width": 128,
    "block_size": 16,
    "blocks": 512,
    "row_blocks": 128,
    "dtype": "bfloat16",
    "cache_dtype": "bfloat16",
    "decode": True,
    "scale": 1.0,
}


def normal(call: Call) -> tuple[Operands, Problem]:
    return problems.check(**call)


def tiled(problem: Problem, **tiling: int) -> Tiling:
    chosen = dataclasses.replace(backend.default_tiling(problem), **tiling)
    assert backend.refusal(problem, chosen) is None
    return chosen


def run(call: Call, *, races: bool = False, **tiling: int) -> Result:
    operands, problem = normal(call)
    chosen = tiled(problem, **tiling)
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    with backends.race_free():
        out_THD, lse_TH = jax.jit(
            lambda operands: backend.attend(operands, problem, chosen, interpret)
        )(operands)
        return np.asarray(out_THD), np.asarray(lse_TH)


@pytest.mark.parametrize(
    ("options", "tiling"),
    [
        ({}, {}),
        ({}, {"splits": 3}),
        ({"window": 150, "query_heads": 4, "kv_heads": 2}, {"splits": 2, "stages": 3}),
        ({"cache_dtype": "int8", "k_scale": "head", "v_scale": "slot", "window": 70}, {}),
    ],
    ids=str,
)
def test_no_race(options, tiling):
    """First and last blocks hold NaN, tables junk, memory that nobody wrote NaN."""
    call = attention.problem(4, **(ROWS | options))
    assert not attention.faults(run(call, races=True, **tiling), call)


@pytest.mark.parametrize(
    ("options", "tiling"),
    [
        ({"dtype": "float16", "causal": False, "query_heads": 5}, {"stages": 1}),
        ({"soft_cap": 3.0, "alibi": True, "window": 64, "scale": -0.2}, {}),
        ({"sinks": True, "query_heads": 12}, {}),
        ({"k_scale": "head", "v_scale": "head", "width": 128}, {"splits": 2}),
        ({"k_scale": "slot", "v_scale": "slot", "width": 256}, {}),
        ({"cache_dtype": "int8", "k_scale": "slot", "v_scale": "head", "block_size": 24}, {}),
        ({"cache_dtype": "float8_e4m3fn", "k_scale": "scalar", "v_scale": "scalar"}, {}),
        (
            {
                "dtype": "float16",
                "cache_dtype": "float8_e5m2",
                "k_scale": "head",
                "v_scale": "scalar",
            },
            {"splits": 2},
        ),
        (
            {"block_size": 8, "query_heads": 4, "kv_heads": 4, "window": 50},
            {"heads": 4, "tokens": 16},
        ),
        ({"block_size": 8, "query_heads": 6, "kv_heads": 2, "alibi": True}, {"heads": 2}),
        ({"block_size": 48, "window": 100}, {}),
        ({"block_size": 256, "window": 100}, {"tokens": 64}),
    ],
    ids=str,
)
def test_options(options, tiling):
    call = attention.problem(3, **(ROWS | options))
    assert not attention.faults(run(call, **tiling), call)


def test_a_mixed_batch():
    """Rows of one query go to this kernel, the others to prefill."""
    call = attention.problem(
        5, lengths=[90, 7, 0, 37], counts=[1, 0, 1, 3], padding=2, dtype="bfloat16", sinks=True
    )
    assert not attention.faults(run(call), call)


# Waits in order of tracing: the consumer's for queries, for full buffers in whole steps and in
# masked ones, of which there are none here, and those of the producer's warps.
WAITS = {"keys_full": 1, "values_full": 2, "free": 5}


@pytest.mark.parametrize("barrier", WAITS)
def test_a_dropped_wait_is_a_race(monkeypatch, barrier):
    call = attention.problem(4, lengths=[256], dtype="bfloat16", query_heads=2, kv_heads=1)
    traced, wait = itertools.count(), plgpu.barrier_wait

    def forgetful(barrier_ref: Any) -> None:
        if next(traced) != WAITS[barrier]:
            wait(barrier_ref)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful)
    try:
        with pytest.raises(RuntimeError, match=r"RACE|race"):
            run(call, races=True, tokens=64, stages=2, splits=1)
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()  # not public, and needed after an error


@pytest.mark.parametrize("window", [None, 1, 70, 300])
@pytest.mark.parametrize("splits", [1, 3, 16])
@pytest.mark.parametrize("block_size", [8, 48, 128])
def test_splits_take_each_visible_token_once(window, splits, block_size):
    problem = Problem(**(SIZES | {"window": window, "block_size": block_size}))
    plan = decode_plan.plan_of(problem, tiled(problem, splits=splits))
    tokens = plan.step.tokens
    for length in (0, 1, 63, 64, 200, 700):
        first = max(0, length - (window or length))
        taken: list[int] = []
        for split in range(splits):
            share = decode_plan.range_of(plan, jnp.int32(length), jnp.int32(split))
            start, steps = int(share.first), int(share.steps)
            taken += range(start, start + steps * tokens)
            for step in range(int(share.full_start), int(share.full_stop)):
                assert first <= start + step * tokens
                assert start + (step + 1) * tokens <= length
        assert (
            sorted(taken) == list(range(taken[0], taken[0] + len(taken))) if taken else not length
        )
        assert {token for token in taken if first <= token < length} == set(range(first, length))
        # Nothing is read but what shares a copy, or the last step, with a visible token.
        assert not taken or (taken[0] > first - plan.step.piece and taken[-1] < length + tokens)


@pytest.mark.parametrize("block_size", [8, 16, 24, 48, 128, 256])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_default_tiling_is_served(block_size, width):
    for heads, cache_dtype, k_scale in itertools.product(
        [(1, 1), (6, 3), (7, 1), (8, 8), (64, 8), (128, 8)],
        ["bfloat16", "int8"],
        ["head", "slot"],
    ):
        problem = Problem(
            **SIZES
            | {"query_heads": heads[0], "kv_heads": heads[1], "width": width}
            | {"block_size": block_size, "cache_dtype": cache_dtype, "k_scale": k_scale}
        )
        assert backend.refusal(problem, backend.default_tiling(problem)) is None


def test_default_splits_fill_the_device():
    """Programs enough for 80% of 132 processors are not split, and rows not below 128 tokens."""

    def splits(rows: int, tokens: int) -> int:
        sizes = {"rows": rows, "queries": rows, "row_blocks": tokens // 16, "kv_heads": 8}
        return backend.default_tiling(Problem(**(SIZES | sizes))).splits or 0

    assert splits(14, 4096) == splits(64, 4096) == splits(1, 128) == 1
    assert splits(1, 1024) in (7, 8)
    assert splits(1, 2**20) * 8 in range(113, 133)
    assert splits(13, 4096) * 13 * 8 / 132 % 1 > 0.75


@pytest.mark.parametrize(
    ("sizes", "tiling", "argument"),
    [
        ({"dtype": "float32", "cache_dtype": "float32"}, {}, "q_THD"),
        ({"cache_dtype": "float32"}, {}, "kv_NUKSD"),
        ({"cache_dtype": "float16"}, {}, "kv_NUKSD"),
        ({"width": 80}, {}, "q_THD"),
        ({"block_size": 4}, {}, "kv_NUKSD"),
        ({"block_size": 20}, {}, "kv_NUKSD"),
        ({"block_size": 512}, {}, "kv_NUKSD"),
        ({"query_heads": 130}, {}, "q_THD"),
        ({}, {"queries": 2}, "tiling.queries"),
        ({}, {"tokens": 24}, "tiling.tokens"),
        ({"block_size": 128}, {"tokens": 12}, "tiling.tokens"),
        ({}, {"heads": 4}, "tiling.heads"),
        ({"block_size": 128}, {"heads": 2, "tokens": 64}, "tiling.heads"),
        ({"k_scale": "slot"}, {"heads": 2}, "tiling.heads"),
        ({}, {"stages": 8}, "tiling.stages"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(sizes, tiling, argument):
    problem = Problem(**(SIZES | sizes))
    refused = backend.refusal(
        problem, dataclasses.replace(backend.default_tiling(problem), **tiling)
    )
    assert refused is not None
    assert re.fullmatch(rf"{re.escape(argument)}: .+", refused)


@pytest.mark.parametrize(
    ("options", "tiling"),
    [
        ({"query_heads": 8, "kv_heads": 2, "width": 128}, {"splits": 2}),
        ({"query_heads": 24, "kv_heads": 2, "window": 40, "sinks": True, "block_size": 24}, {}),
        ({"query_heads": 4, "kv_heads": 4, "alibi": True, "soft_cap": 5.0, "block_size": 8}, {}),
        ({"block_size": 128, "width": 256, "k_scale": "slot", "v_scale": "slot"}, {}),
        ({"cache_dtype": "int8", "k_scale": "head", "v_scale": "slot"}, {}),
        (
            {
                "dtype": "float16",
                "cache_dtype": "float8_e5m2",
                "k_scale": "slot",
                "v_scale": "head",
            },
            {},
        ),
    ],
    ids=str,
)
def test_lowers(options, tiling):
    call = attention.problem(6, **({"lengths": [40], "dtype": "bfloat16"} | options))
    operands, problem = normal(call)
    chosen = tiled(problem, **tiling)
    traced = jax.jit(lambda operands: backend.attend(operands, problem, chosen, None)).trace(
        operands
    )
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
