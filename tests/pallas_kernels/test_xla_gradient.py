"""The xla gradient, tile by tile, against JAX's own of the dense definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference, xla, xla_gradient
from pallas_kernels.ops import paged_attention
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling
from tests.pallas_kernels.test_xla import RAGGED, SMALL, checked, shapes
from tests.support import attention

Pair = tuple[jax.Array, jax.Array]

CALLS: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [9, 0, 33], "k_scale": "head", "v_scale": "head", "sinks": True},
    "ragged": {**RAGGED, "window": 9, "soft_cap": 2.0, "sinks": True, "alibi": True},
    "slot scales": {**RAGGED, "k_scale": "slot", "v_scale": "slot", "causal": False},
    "draft": {**RAGGED, "draft": True, "poison": False, "query_heads": 3, "kv_heads": 1},
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    default = xla.default_tiling

    def small(problem: Problem) -> Tiling:
        return dataclasses.replace(default(problem), queries=2, tokens=8, splits=3)

    monkeypatch.setattr(xla, "default_tiling", small)


def shared(call: attention.Call) -> attention.Call:
    """The call with the first row's first block, which is full, in the last row, too."""
    table_BM = call["table_BM"].copy()
    table_BM[-1, 0] = table_BM[0, 0]
    return call | {"table_BM": table_BM}


def cotangents(call: attention.Call) -> Pair:
    rng = np.random.default_rng(5)
    shape = call["q_THD"].shape
    return jnp.array(rng.normal(size=shape)), jnp.array(rng.normal(size=shape[:2]))


def dense(operands: Operands, problem: Problem, owed: Pair) -> Operands:
    """JAX's gradient of the reference, with 0 for NaN: a product would carry it on."""
    floats = {
        name: jnp.nan_to_num(array)
        for name, array in operands._asdict().items()
        if array is not None and jnp.issubdtype(array.dtype, jnp.inexact)
    }

    def attend(floats: dict[str, jax.Array]) -> Pair:
        asked = operands._replace(**floats)
        out_THD, lse_TH = reference.attend(asked, problem, Tiling(), None)
        return out_THD, jnp.where(lse_TH > -jnp.inf, lse_TH, 0)

    (slopes,) = jax.vjp(attend, floats)[1](owed)
    return Operands(**(dict.fromkeys(Operands._fields) | slopes))


def tiled(operands: Operands, problem: Problem, owed: Pair) -> Operands:
    result = xla.attend(operands, problem, xla.default_tiling(problem), None)
    return xla_gradient.gradient(operands, problem, result, owed)


@pytest.mark.parametrize("name", CALLS)
def test_agrees_with_the_gradient_of_the_definition(name):
    """Where blocks are shared, too, and with exact zeros for slots that hold NaN."""
    call = shared(attention.problem(1, **(SMALL | CALLS[name])))
    operands, problem = checked(call)
    owed = cotangents(call)
    expected = jax.jit(dense, static_argnums=1)(operands, problem, owed)
    found = jax.jit(tiled, static_argnums=1)(operands, problem, owed)
    for field, slope, exact in zip(Operands._fields, found, expected, strict=True):
        assert (slope is None) == (exact is None), field
        if slope is not None:
            np.testing.assert_allclose(slope, exact, rtol=1e-4, atol=2e-5, err_msg=field)
            unread = np.isnan(np.asarray(getattr(operands, field)))
            assert not np.asarray(slope)[unread].any(), field


def test_memory_is_that_of_some_tiles():
    """And of the result, which is not temporary: as large as the pool, in f32."""

    def loss(q_THD: jax.Array, kv_NUKSD: jax.Array, *arrays: jax.Array) -> jax.Array:
        return jnp.sum(paged_attention(q_THD, kv_NUKSD, *arrays, backend="xla"))

    slope = jax.jit(jax.grad(loss, 1))
    short, long = (
        slope.lower(*shapes(row_blocks, "float32", "float32")).compile().memory_analysis()
        for row_blocks in (64, 4096)
    )
    assert short is not None
    assert long is not None
    assert short.temp_size_in_bytes == long.temp_size_in_bytes < 2**20
