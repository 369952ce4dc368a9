"""Compiled for the device at hand, kernels give the exact answers and err no more than the rule.

The interpreters that the other tests use know no asynchronous copies out of order, no tensor core's
rounding, no memory that was someone else's: these run the same questions on a GPU or a TPU. What a
kernel refuses is skipped with its words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ops import KERNELS, paged_attention
from pallas_kernels.tiling import Tiling
from tests.support import attention, attention_cases
from tests.support.attention import Call, Result
from tests.support.attention_cases import Case

pytestmark = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=getattr(pytest.mark, platform))
        for platform, name in KERNELS.items()
    ],
)
Property = Callable[[str, object], None]
PREFILL: dict[str, Any] = {"lengths": [90, 3, 40], "counts": [70, 3, 1], "padding": 3}
DECODE: dict[str, Any] = {"lengths": [1, 200, 0, 64, 17]}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 33},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "wide groups": {"query_heads": 16, "kv_heads": 2, "width": 128, "block_size": 8},
    "one head": {"query_heads": 1, "kv_heads": 1, "width": 128, "block_size": 64},
    "odd groups": {"query_heads": 15, "kv_heads": 3, "block_size": 32},
    "int8, a scale a head": {"cache_dtype": "int8", "k_scale": "head", "v_scale": "head"},
    "int8, a scale a slot": {
        "cache_dtype": "int8",
        "k_scale": "slot",
        "v_scale": "slot",
        "block_size": 64,
    },
    "fp8": {"cache_dtype": "float8_e4m3fn", "k_scale": "head", "v_scale": "head"},
}


def run(call: Call, backend: str, **tiling: int) -> Result:
    """Output and lse on the device, in memory that held NaN; skips what the kernel refuses."""
    arrays = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
    options = {name: value for name, value in call.items() if name not in arrays}
    options |= {"backend": backend, "return_lse": True}
    options |= {"tiling": Tiling(**tiling)} if tiling else {}
    attend = jax.jit(lambda arrays: paged_attention(**arrays, **options))
    try:
        compiled = attend.lower(arrays).compile()
    except ValueError as error:
        if "cannot serve this" not in str(error):
            raise
        pytest.skip(str(error))
    tokens, heads, width = call["q_THD"].shape
    stale = [jnp.full((tokens * heads * width,), jnp.nan) for _ in range(8)]
    jax.block_until_ready(stale)
    for array in stale:
        array.delete()
    out_THD, lse_TH = compiled(arrays)
    return np.asarray(out_THD), np.asarray(lse_TH)


@pytest.mark.parametrize(
    "case", [*attention_cases.exact_cases("bfloat16")], ids=lambda case: case.name
)
def test_exact_answers(case: Case, backend: str) -> None:
    splits = {"splits": case.splits} if case.splits else {}
    out_THD, lse_TH = run(case.call, backend, **splits)
    assert attention.faults((out_THD, lse_TH), case.call) == []
    if case.out_TH is not None:
        lanes_THD = np.broadcast_to(np.array(case.out_TH)[..., None], out_THD.shape)
        np.testing.assert_allclose(out_THD.astype(np.float64), lanes_THD, rtol=2**-7)
        np.testing.assert_allclose(lse_TH, np.array(case.lse_TH), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("options", [*OPTIONS.values()], ids=[*OPTIONS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_values(
    rows: dict[str, Any],
    options: dict[str, Any],
    dtype: str,
    backend: str,
    record_property: Property,
) -> None:
    call = attention.problem(7, dtype=dtype, **rows, **options)
    result = run(call, backend)
    record_error(result, call, record_property)
    assert attention.faults(result, call) == []


@pytest.mark.parametrize("splits", [2, 16])
def test_splits(splits: int, backend: str) -> None:
    call = attention.problem(8, lengths=[900, 0, 1, 130], dtype="bfloat16")
    assert attention.faults(run(call, backend, splits=splits), call) == []


def test_float32_is_exact_or_refused(backend: str, record_property: Property) -> None:
    """Case 19: a product in TF32 or bf16 passes would err by 1e-3."""
    call = attention_cases.random_f32()
    result = run(call, backend)
    record_error(result, call, record_property)
    exact_THD, _ = attention.attend(**call)
    assert np.abs(result[0] - exact_THD).max() <= 1e-5


def test_long_rows_repeat_to_the_bit_and_match_xla(backend: str, record_property: Property) -> None:
    """An error that moves between runs is a race; here every processor has several rows."""
    rng = np.random.default_rng(9)
    rows, row_blocks, size = 64, 128, 16
    table_BM = rng.permutation(rows * row_blocks).reshape(rows, row_blocks).astype(np.int32)
    pool = (rows * row_blocks, 2, 8, size, 128)
    call: Call = {
        "q_THD": jax.random.normal(jax.random.key(0), (rows, 32, 128), jnp.bfloat16),
        "kv_NUKSD": jax.random.normal(jax.random.key(1), pool, jnp.bfloat16),
        "table_BM": jnp.asarray(table_BM),
        "length_B": jnp.asarray(rng.integers(1, row_blocks * size, rows, dtype=np.int32)),
    }
    attend = jax.jit(lambda call: paged_attention(**call, backend=backend))
    first = np.asarray(attend(call).astype(jnp.float32))
    for _ in range(20):
        np.testing.assert_array_equal(attend(call).astype(jnp.float32), first)
    wide = call | {name: call[name].astype(jnp.float32) for name in ("q_THD", "kv_NUKSD")}
    exact = paged_attention(**wide, backend="xla")
    error = float(jnp.abs(first - exact).max())
    record_property("error", error)
    assert error <= 2**-7  # values are averages of hundreds: below 1, in bf16


def record_error(result: Result, call: Call, record_property: Property) -> None:
    """Puts the largest errors, the kernel's and a naive one's, into the report."""
    exact_THD, _ = attention.attend(**call)
    naive_THD, _ = attention.naive(call)
    record_property("error", float(np.abs(result[0].astype(np.float64) - exact_THD).max()))
    record_property("naive", float(np.abs(naive_THD.astype(np.float64) - exact_THD).max()))
