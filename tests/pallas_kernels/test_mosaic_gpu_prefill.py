"""The Hopper prefill kernel, called by itself: in the interpreter, lowered, and refusing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import problem as problems
from pallas_kernels.mosaic_gpu import prefill
from pallas_kernels.problem import Operands, Problem
from tests.support import attention, attention_cases, backends
from tests.support.attention import Call, Result

CASES = {
    case.name: case
    for case in attention_cases.exact_cases("bfloat16")
    if "query_start_P" in case.call and not case.splits and case.call["kv_NUKSD"].shape[3] >= 8
}
# Rows that start where a copy may not, a row without queries, one longer than its cache, one of
# several tiles, and contexts that a step does not divide.
RAGGED: Call = {
    "lengths": [90, 7, 0, 12, 150],
    "counts": [5, 0, 2, 12, 70],
    "padding": 4,
    "dtype": "bfloat16",
}


def normal(call: Call) -> tuple[Operands, Problem]:
    return problems.check(**call)


def run(call: Call, *, races: bool = False, **tiling: int) -> Result:
    operands, problem = normal(call)
    chosen = dataclasses.replace(prefill.default_tiling(problem), **tiling)
    assert prefill.refusal(problem, chosen) is None
    interpret = plgpu.InterpretGPUParams(detect_races=races)
    with backends.race_free():
        out_THD, lse_TH = jax.jit(
            lambda operands: prefill.attend(operands, problem, chosen, interpret)
        )(operands)
        return np.asarray(out_THD), np.asarray(lse_TH)


@pytest.mark.parametrize("name", CASES)
def test_a_case_has_its_answer(name):
    case = CASES[name]
    out_THD, lse_TH = run(case.call, races=True)
    if case.out_TH is None:
        assert not attention.faults((out_THD, lse_TH), case.call)
        return
    expected_THD = np.broadcast_to(np.array(case.out_TH)[..., None], out_THD.shape)
    np.testing.assert_allclose(out_THD.astype(np.float64), expected_THD, rtol=2**-8)
    np.testing.assert_allclose(lse_TH, case.lse_TH, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "tiling"),
    [
        ({}, {}),
        ({"dtype": "float16", "causal": False, "block_size": 48}, {"stages": 1}),
        ({"window": 20, "block_size": 8, "kv_heads": 1}, {"queries": 32}),
        ({"window": 70, "block_size": 128, "query_heads": 6}, {"queries": 128}),
        ({"window": 9, "causal": False, "width": 128}, {"queries": 64, "stages": 2}),
        ({"soft_cap": 3.0, "sinks": True, "alibi": True, "window": 64}, {}),
        ({"draft": True, "sinks": True}, {"queries": 64}),
        ({"draft": True, "causal": False, "window": 30, "scale": -0.2}, {}),
        ({"cache_dtype": "int8", "k_scale": "head", "v_scale": "slot"}, {"queries": 64}),
        ({"cache_dtype": "float8_e4m3fn", "k_scale": "slot", "v_scale": "head"}, {"stages": 1}),
        ({"cache_dtype": "float8_e5m2", "k_scale": "head", "v_scale": "head"}, {"stages": 2}),
    ],
    ids=str,
)
def test_options(options, tiling):
    call = attention.problem(3, **(RAGGED | options))
    assert not attention.faults(run(call, **tiling), call)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "int8"])
def test_no_race(cache_dtype):
    """More steps than stages, two consumers, a first and a last block that hold NaN."""
    scales: Call = {} if cache_dtype == "bfloat16" else {"k_scale": "head", "v_scale": "slot"}
    call = attention.problem(
        4,
        lengths=[260],
        counts=[70],
        window=150,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        **scales,
    )
    assert not attention.faults(run(call, races=True, queries=64, stages=2), call)


# Waits in order of tracing: the producer's for free buffers, two to drain them, a consumer's.
WAITS = {"keys_free": 0, "query_full": 4, "keys_full": 5, "values_full": 6}


@pytest.mark.parametrize("barrier", WAITS)
def test_a_dropped_wait_is_reported(monkeypatch, barrier):
    call = attention.problem(4, lengths=[260], counts=[8], dtype="bfloat16")
    traced, wait = itertools.count(), plgpu.barrier_wait

    def forgetful(barrier_ref: Any) -> None:
        if next(traced) != WAITS[barrier]:
            wait(barrier_ref)

    monkeypatch.setattr(plgpu, "barrier_wait", forgetful)
    try:
        with pytest.raises(RuntimeError):
            run(call, races=True, stages=2)
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()  # not public, and needed after an error
    assert next(traced) > max(WAITS.values())


LOWERED: dict[str, Call] = {
    "widest": {"width": 256, "window": 100, "alibi": True, "sinks": True, "soft_cap": 30.0},
    "f16, blocks of 8": {"dtype": "float16", "block_size": 8, "query_heads": 16, "kv_heads": 1},
    "odd group, blocks of 256": {"width": 128, "block_size": 256, "query_heads": 10},
    "bidirectional": {"width": 128, "causal": False, "block_size": 48},
    "draft": {"width": 128, "draft": True, "window": 100},
    "int8": {"width": 128, "cache_dtype": "int8", "k_scale": "head", "v_scale": "head"},
    "fp8": {
        "width": 128,
        "dtype": "float16",
        "cache_dtype": "float8_e4m3fn",
        "k_scale": "slot",
        "v_scale": "slot",
    },
    "fp8, widest": {
        "width": 256,
        "cache_dtype": "float8_e5m2",
        "k_scale": "slot",
        "v_scale": "head",
    },
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda(name):
    """Without a device, with one consumer and with two."""
    operands, problem = normal(attention.problem(3, **(RAGGED | LOWERED[name])))
    default = prefill.default_tiling(problem)
    assert default.queries is not None
    two_consumers = dataclasses.replace(default, queries=2 * default.queries, stages=2)
    for tiling in (default, two_consumers)[: 1 if problem.width == 256 else 2]:
        assert prefill.refusal(problem, tiling) is None
        attend = functools.partial(prefill.attend, problem=problem, tiling=tiling, interpret=None)
        lowered = jax.jit(attend).trace(operands).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()


def a_problem(**sizes: Any) -> Problem:
    _, problem = normal(attention.problem(3, **RAGGED))
    return dataclasses.replace(problem, **sizes)


def test_default_tilings_are_legal_and_suit_the_work():
    for group, width, block_size, cache_dtype, rows in itertools.product(
        (1, 2, 3, 4, 6, 8, 16, 24), (64, 128, 256), (8, 48, 256), ("bfloat16", "int8"), (1, 500)
    ):
        problem = a_problem(
            query_heads=8 * group,
            kv_heads=8,
            width=width,
            block_size=block_size,
            cache_dtype=cache_dtype,
            rows=rows,
            queries=4096,
        )
        tiling = prefill.default_tiling(problem)
        assert None not in dataclasses.asdict(tiling).values()
        assert prefill.refusal(problem, tiling) is None
        assert (tiling.stages or 0) >= (1 if width == 256 else 3)
    sizes = {"query_heads": 32, "kv_heads": 8, "width": 128}
    assert prefill.default_tiling(a_problem(**sizes, rows=1, queries=4096)).queries == 32
    assert prefill.default_tiling(a_problem(**sizes, rows=1, queries=256)).queries == 16
    assert prefill.default_tiling(a_problem(**sizes, rows=256, queries=4096)).queries == 16


@pytest.mark.parametrize(
    ("sizes", "tiling", "message"),
    [
        ({}, {"queries": 48}, "tiling.queries: expected one of [32, 64], got 48"),
        ({"width": 256}, {"queries": 64}, "tiling.queries: expected one of [32], got 64"),
        ({}, {"tokens": 128}, "tiling.tokens: expected 64, got 128"),
        (
            {"width": 256},
            {"stages": 3},
            "tiling.stages: expected at most 2 in shared memory, got 3",
        ),
    ],
)
def test_illegal_tilings_are_refused_by_name(sizes, tiling, message):
    problem = a_problem(**sizes)
    chosen = dataclasses.replace(prefill.default_tiling(problem), **tiling)
    assert prefill.refusal(problem, chosen) == message
