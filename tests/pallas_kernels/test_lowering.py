"""Kernels lower for the machines they are for, with plain jaxlib and no device."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ops import KERNELS, paged_attention
from pallas_kernels.problem import QUANTISED
from tests.support import backends, covers

# A back end's platform, and what a lowered kernel of it is called.
PLATFORMS = {"mosaic_gpu": ("cuda", "mosaic_gpu"), "mosaic_tpu": ("tpu", "tpu_custom_call")}
assert set(PLATFORMS) == set(KERNELS.values())
SHAPES: dict[str, tuple[Any, ...]] = {
    "block_size": (8, 16, 32, 64, 128, 256),
    "width": (64, 128, 256),
    "group": (1, 2, 3, 4, 5, 6, 7, 8, 16),
    "form": ("decode", "ragged"),
}
FACTORS = SHAPES | {
    "kv_heads": (1, 2, 8),
    "dtype": ("bfloat16", "float16", "float32"),
    "cache_dtype": (None, *QUANTISED),  # None: that of the queries
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mask": {"window": 100, "draft_mask_TQ": ("T", "Q")},
    "logit": {"soft_cap": 30.0, "alibi_slope_H": "H", "sinks_H": "H"},
    "scales of heads": {"k_scale": "K", "v_scale": "K", "causal": False},
    "scales of slots": {"k_scale": ("N", "K", "S"), "v_scale": ("N", "K", "S")},
    "sizes": {"block_size": 1, "group": 3, "width": 80},
}
COVER = covers.pairwise(FACTORS)


def lower(
    backend: str,
    *,
    block_size: int = 16,
    width: int = 128,
    group: int = 4,
    kv_heads: int = 2,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    form: str = "decode",
    **options: Any,
) -> str | None:
    """A call's lowered text; None where the back end may refuse it and does so by name.

    An option that is letters is an array of these axes.
    """
    sizes = {"B": 8, "P": 9, "M": 16, "N": 100, "U": 2, "Q": 16, "T": 8 if form == "decode" else 64}
    sizes |= {"S": block_size, "D": width, "K": kv_heads, "H": group * kv_heads}
    cache_dtype = cache_dtype or dtype
    if cache_dtype in QUANTISED:
        options = {"k_scale": "K", "v_scale": "K"} | options
    types = {"q_THD": dtype, "kv_NUKSD": cache_dtype, "draft_mask_TQ": "bool"}
    types |= dict.fromkeys(("table_BM", "length_B", "query_start_P"), "int32")
    letters: dict[str, Any] = {"q_THD": "THD", "kv_NUKSD": "NUKSD", "table_BM": "BM"}
    letters |= {"length_B": "B"} | ({"query_start_P": "P"} if form == "ragged" else {})
    letters |= {name: axes for name, axes in options.items() if isinstance(axes, str | tuple)}
    arrays = {
        name: jax.ShapeDtypeStruct(
            tuple(sizes[axis] for axis in axes), jnp.dtype(types.get(name, "float32"))
        )
        for name, axes in letters.items()
    }
    static = {name: value for name, value in options.items() if name not in arrays}
    attend = jax.jit(lambda arrays: paged_attention(**arrays, **static, backend=backend))
    platform, call = PLATFORMS[backend]
    try:
        traced = attend.trace(arrays)
    except ValueError as refusal:
        floats = {dtype, cache_dtype} - set(QUANTISED)
        promised = backends.promises(backend, floats, block_size=block_size, width=width)
        backends.check_refusal(refusal, backend, promised=promised)
        return None
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert call in text
    return text


@pytest.mark.parametrize("combination", COVER, ids=lambda sizes: "-".join(map(str, sizes.values())))
@pytest.mark.parametrize("backend", PLATFORMS)
def test_every_pair_of_sizes_and_types_lowers(backend, combination):
    lower(backend, **combination)


@pytest.mark.parametrize("form", ["decode", "ragged"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", PLATFORMS)
def test_options_lower(backend, option, form):
    options = OPTIONS[option]
    if form == "decode":
        options = {name: value for name, value in options.items() if name != "draft_mask_TQ"}
    lower(backend, form=form, **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", SHAPES["form"])
@pytest.mark.parametrize("width", SHAPES["width"])
@pytest.mark.parametrize("backend", PLATFORMS)
def test_every_shape_lowers(backend, width, form):
    for block_size, group in itertools.product(SHAPES["block_size"], SHAPES["group"]):
        assert lower(backend, block_size=block_size, width=width, group=group, form=form)


@pytest.mark.parametrize("form", SHAPES["form"])
@pytest.mark.parametrize("backend", PLATFORMS)
def test_a_batch_lowers(backend, form):
    """A kernel sees a larger problem, never a batch axis."""
    batch, tokens, rows = 3, 4 if form == "decode" else 10, 4
    types = jnp.bfloat16
    queries = jax.ShapeDtypeStruct((batch, tokens, 8, 128), types)
    pool = jax.ShapeDtypeStruct((batch, 20, 2, 2, 16, 128), types)
    table = jax.ShapeDtypeStruct((rows, 5), jnp.int32)
    length = jax.ShapeDtypeStruct((rows,), jnp.int32)
    starts = None if form == "decode" else jax.ShapeDtypeStruct((rows + 1,), jnp.int32)

    def attend(q_THD, kv_NUKSD, table_BM, length_B, query_start_P):
        return paged_attention(q_THD, kv_NUKSD, table_BM, length_B, query_start_P, backend=backend)

    batched = jax.jit(jax.vmap(attend, in_axes=(0, 0, None, None, None)))
    platform, call = PLATFORMS[backend]
    traced = batched.trace(queries, pool, table, length, starts)
    assert call in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("backend", "form"),
    [(backend, form) for backend in ("mosaic_gpu", "mosaic_tpu") for form in ("decode", "ragged")],
)
def test_a_kernel_lowers_where_python_numbers_are_of_64_bits(backend, form):
    with jax.enable_x64(True):
        assert lower(backend, form=form, window=100, sinks_H="H")
