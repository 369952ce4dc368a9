"""Parts of a cache put together: empty parts weigh nothing, whatever stale memory they hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import merge

INF = np.inf


def state(out: float, lse: float, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """One query, one head, width 1."""
    return jnp.full((1, 1, 1), out, dtype), jnp.full((1, 1), lse, jnp.float32)


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [
        ((0.0, -INF), (0.0, -INF), (0.0, -INF)),
        ((0.0, -INF), (5.0, 1.25), (5.0, 1.25)),
        ((5.0, 1.25), (0.0, -INF), (5.0, 1.25)),
        ((1.0, 0.0), (3.0, 0.0), (2.0, np.log(2))),
        ((np.nan, -INF), (5.0, 1.25), (5.0, 1.25)),
        ((np.nan, -INF), (np.nan, -INF), (0.0, -INF)),
        ((1.0, 200.0), (3.0, 200.0), (2.0, 200 + np.log(2))),  # e^200 is past f32
        ((1.0, -200.0), (3.0, -200.0), (2.0, -200 + np.log(2))),
    ],
)
def test_two_parts(a, b, merged):
    """Case 12, and stale outputs of empty parts."""
    for out, lse in (
        merge.merge_attention(*state(*a), *state(*b)),
        merge.merge_splits(
            *(jnp.stack(pair) for pair in zip(state(*a), state(*b), strict=True)), dtype="float32"
        ),
    ):
        np.testing.assert_allclose(out, [[[merged[0]]]], rtol=1e-6)
        np.testing.assert_allclose(lse, [[merged[1]]], rtol=1e-6)


def test_the_output_has_the_first_parts_type():
    out, lse = merge.merge_attention(*state(1, 0, "bfloat16"), *state(3, 0))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_splits_are_softmax_over_all_keys():
    """Parts of any size, some empty, against float64 over the keys in one piece."""
    rng = np.random.default_rng(0)
    logit, v = rng.normal(size=(3, 10)), rng.normal(size=(10, 4))
    parts = [slice(0, 6), slice(6, 6), slice(6, 7), slice(7, 10)]
    weight = np.exp(logit)
    sums = np.stack([weight[:, part].sum(1) for part in parts])
    with np.errstate(divide="ignore", invalid="ignore"):
        outs = np.stack([weight[:, part] @ v[part] for part in parts]) / sums[..., None]
        lse = np.log(sums)
    out, total = merge.merge_splits(jnp.asarray(outs), jnp.asarray(lse), dtype="float32")
    np.testing.assert_allclose(out, weight @ v / weight.sum(1, keepdims=True), rtol=2e-6)
    np.testing.assert_allclose(total, np.log(weight.sum(1)), rtol=2e-6)


def test_a_sink_is_a_key_without_value():
    out, lse = state(1.0, np.log(3.0))
    with_sink, total = merge.add_sinks(out, lse, jnp.zeros(1))
    np.testing.assert_allclose([with_sink.item(), total.item()], [0.75, np.log(4)], rtol=1e-6)
    with_sink, total = merge.add_sinks(jnp.full_like(out, jnp.nan), lse - INF, jnp.full(1, 1.5))
    assert (with_sink.item(), total.item()) == (0.0, 1.5)
    with_sink, total = merge.add_sinks(out, lse, jnp.full(1, -INF))
    np.testing.assert_allclose([with_sink.item(), total.item()], [1.0, np.log(3)], rtol=1e-6)


def test_gradients_of_empty_parts_are_zero():
    def total(lse_a, lse_b):
        out, lse = merge.merge_attention(jnp.ones((1, 1, 1)), lse_a, jnp.ones((1, 1, 1)), lse_b)
        return out.sum() + jnp.where(lse > -INF, lse, 0).sum()

    empty, full = jnp.full((1, 1), -INF), jnp.zeros((1, 1))
    for a, b, expected in ((empty, full, (0, 1)), (full, full, (0.5, 0.5)), (empty, empty, (0, 0))):
        gradients = jax.grad(total, argnums=(0, 1))(a, b)
        np.testing.assert_allclose([g.item() for g in gradients], expected, atol=1e-6)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="axis H has size 2"):
        merge.merge_attention(
            jnp.ones((1, 1, 1)), jnp.ones((1, 2)), jnp.ones((1, 1, 1)), jnp.ones((1, 1))
        )
