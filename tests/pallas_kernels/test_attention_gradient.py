"""Gradients of paged attention against differences of the float64 definition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ops import paged_attention
from tests.support import attention
from tests.support.attention import Call, problem

STEP = 1e-4
SHAPE: Call = {"block_size": 8, "row_blocks": 6, "blocks": 14}
RAGGED: Call = {"lengths": [20, 0, 37], "counts": [1, 0, 4], "padding": 2, **SHAPE}
CALLS: dict[str, Call] = {
    "decode": {"lengths": [20, 0, 37], **SHAPE},
    "window": {**RAGGED, "window": 7},
    "not causal": {**RAGGED, "causal": False, "draft": True},
    "logit": {
        **RAGGED,
        "soft_cap": 2.0,
        "sinks": True,
        "alibi": True,
        "k_scale": "head",
        "v_scale": "head",
    },
    "slot scales": {**RAGGED, "k_scale": "slot", "v_scale": "slot", "scale": 0.3},
    "int8": {
        **RAGGED,
        "dtype": "bfloat16",
        "cache_dtype": "int8",
        "k_scale": "head",
        "v_scale": "slot",
    },
}
TRAINABLE = ("q_THD", "kv_NUKSD", "sinks_H", "alibi_slope_H", "k_scale", "v_scale")


def trainable(call: Call) -> Call:
    return {
        name: call[name]
        for name in TRAINABLE
        if name in call and jnp.issubdtype(call[name].dtype, jnp.floating)
    }


def weights(call: Call) -> attention.Result:
    rng = np.random.default_rng(3)
    shape = call["q_THD"].shape
    return rng.normal(size=shape), rng.normal(size=shape[:2])


def exact_loss(call: Call) -> float:
    """A weighted sum of outputs and of what lse is finite, in float64."""
    parts = zip(attention.attend(**call), weights(call), strict=True)
    return sum(float((part * weight)[np.isfinite(part)].sum()) for part, weight in parts)


def loss(arrays: Call, call: Call, backend: str = "xla") -> jax.Array:
    """What ``exact_loss`` says of the call with other arrays."""
    out_weight, lse_weight = (jnp.asarray(weight, jnp.float32) for weight in weights(call))
    out, lse = paged_attention(**call | arrays, backend=backend, return_lse=True)
    out = jnp.sum(out.astype(jnp.float32) * out_weight)
    return out + jnp.sum(jnp.where(lse > -jnp.inf, lse * lse_weight, 0))


def gradient(call: Call, backend: str = "xla") -> Call:
    slopes = jax.jit(jax.grad(lambda arrays: loss(arrays, call, backend)))(trainable(call))
    return {name: np.asarray(value) for name, value in slopes.items()}


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "xla") for name in CALLS), ("decode", "reference")]
)
def test_gradients_are_slopes_of_the_definition(name, backend):
    """Along random directions; slots that nobody reads get 0 although they hold NaN.

    A cache of int8 still gives gradients of queries and scales.
    """
    call = problem(3, **CALLS[name])
    computed = gradient(call, backend)
    assert {name: slope.dtype for name, slope in computed.items()} == {
        name: array.dtype for name, array in trainable(call).items()
    }
    rng = np.random.default_rng(4)
    tolerance = 1e-4 if call["q_THD"].dtype == np.float32 else 2e-2
    for operand, slope in computed.items():
        base = call[operand].astype(np.float64)
        assert not slope[np.isnan(base)].any(), f"{operand}: a slope where nobody reads"
        for _ in range(3):
            direction = rng.normal(size=base.shape)
            along, expected = slopes(call, operand, direction, slope)
            size = np.abs(slope.astype(np.float64) * direction).max()
            assert abs(along - expected) <= tolerance * max(abs(expected), size, 1), operand


def slopes(
    call: Call, operand: str, direction: np.ndarray, slope: np.ndarray
) -> tuple[float, float]:
    """The loss's slope along a direction: of a gradient, and of the definition's difference."""
    base = call[operand].astype(np.float64)
    ends = [exact_loss(call | {operand: base + s * direction}) for s in (STEP, -STEP)]
    return float((slope.astype(np.float64) * direction).sum()), (ends[0] - ends[1]) / (2 * STEP)


def test_a_wrong_slope_is_noticed():
    """The check above, of a gradient whose window is one token wider than the loss's."""
    call = problem(3, **CALLS["window"], poison=False)
    slope = gradient(call | {"window": 8})["q_THD"]
    direction = np.random.default_rng(4).normal(size=slope.shape)
    along, expected = slopes(call, "q_THD", direction, slope)
    assert abs(along - expected) > 1e-2 * max(abs(expected), 1)


def test_gradients_go_through_vmap():
    """Gradient of a batch, and a batch of gradients."""
    calls = [problem(seed, **CALLS["decode"], sinks=True) for seed in (3, 4)]
    some = {name: np.stack([call[name] for call in calls]) for name in trainable(calls[0])}
    rest = {name: np.stack([call[name] for call in calls]) for name in calls[0].keys() - some}

    def each(some: Call, rest: Call) -> jax.Array:
        return loss(some | rest, calls[0])

    batches = (
        jax.jit(jax.vmap(jax.grad(each)))(some, rest),
        jax.jit(jax.grad(lambda some: jnp.sum(jax.vmap(each)(some, rest))))(some),
    )
    rng = np.random.default_rng(4)
    for index, call in enumerate(calls):
        for operand in some:
            direction = rng.normal(size=call[operand].shape)
            for batch in batches:
                slope = np.asarray(batch[operand][index])
                along, expected = slopes(call, operand, direction, slope)
                np.testing.assert_allclose(along, expected, rtol=1e-4, atol=1e-4)
