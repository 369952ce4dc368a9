"""Who is timed: our kernels on paged and on contiguous blocks, JAX's own, and dense baselines.

Each contender answers the same calls, one for each set of inputs, unrolled in one program: a loop
would add the slicing of its inputs to every call. ``paged`` and ``contiguous`` are one kernel whose
tables differ; ``dense`` and ``torch`` know no tables and read a cache of the padded length, each
row in one piece; ``jax`` is the kernel that JAX ships for the platform, in its own layout.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments import attention_inputs, torch_attention
from experiments.attention_inputs import Batch, Inputs, Shape
from pallas_kernels import ops
from pallas_kernels.problem import QUANTISED
from pallas_kernels.tiling import Tiling

DENSE = ("dense", "torch")  # of a contiguous cache
TABLES = ("contiguous", "paged")  # our kernels', of blocks in order and in random order
CONTENDERS = (*DENSE, *TABLES, "jax")
Calls = tuple[Callable[..., list[Any]], tuple[Any, ...]]


def refusal(contender: str, shape: Shape, platform: str) -> str | None:
    """Why a contender cannot answer a shape, in a line, or None. Our kernels say it themselves."""
    if contender not in TABLES and shape.dtype in QUANTISED:
        return "is asked for floats only"
    if contender == "dense" and shape.chunk > 1:
        return "decodes only"
    if contender == "jax" and platform not in ("gpu", "tpu"):
        return f"does not exist for a {platform}"
    if contender == "jax" and platform == "gpu" and shape.chunk > 1:
        return "decodes only on a GPU"
    return _torch_refusal(shape, platform) if contender == "torch" else None


def _torch_refusal(shape: Shape, platform: str) -> str | None:
    if platform != "gpu" or not torch_attention.sees_gpu():
        return "needs a GPU and PyTorch that sees it"
    if shape.ragged and shape.batch > 1:
        return "is asked for full rows only"
    if shape.chunk not in (1, shape.context):
        return "aligns its causal mask with the first token: only whole prompts compare"
    return None


def attend(batch: Batch, shape: Shape, table: str, backend: str, tiling: Tiling | None) -> Calls:
    """Our op on ``paged`` or ``contiguous`` blocks: a function to compile, and its arguments."""
    scale = attention_inputs.cache_scale(shape)

    @jax.jit  # within the program, so that a kernel is traced and lowered once for all sets
    def call(kv_NUKSD: jax.Array, one: Inputs) -> jax.Array:
        return ops.paged_attention(
            one.q_THD,
            kv_NUKSD,
            one.table_BM,
            one.length_B,
            one.query_start_P,
            backend=backend,
            tiling=tiling,
            k_scale=scale,
            v_scale=scale,
        )

    def calls(kv_NUKSD: jax.Array, sets: list[Inputs]) -> list[jax.Array]:
        return [call(kv_NUKSD, one) for one in sets]

    return calls, (batch.kv_NUKSD, getattr(batch, table))


def attend_dense(batch: Batch, shape: Shape) -> Calls:
    """One dense product over a contiguous cache of the padded length, with a mask of lengths."""
    tokens = shape.row_blocks * shape.block_size
    caches = [
        tuple(
            batch.kv_NUKSD[one.table_BM, side]
            .swapaxes(1, 2)
            .reshape(shape.batch, shape.kv_heads, tokens, shape.width)
            for side in (0, 1)
        )
        for one in batch.contiguous
    ]

    def calls(sets: list[Inputs], caches: list[Any]) -> list[jax.Array]:
        return [
            _dense_decode(one.q_THD, k, v, one.length_B)
            for one, (k, v) in zip(sets, caches, strict=True)
        ]

    return calls, (batch.contiguous, caches)


def _dense_decode(q: jax.Array, k: jax.Array, v: jax.Array, length_B: jax.Array) -> jax.Array:
    """Decode attention of q [B, H, D] over k and v [B, K, tokens, D], softmax in f32."""
    rows, heads, width = q.shape
    q = q.reshape(rows, k.shape[1], -1, width) * jnp.asarray(width**-0.5, q.dtype)
    logits = jnp.einsum("bkgd,bkjd->bkgj", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[2]) < length_B[:, None, None, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf)).astype(v.dtype)
    out = jnp.einsum("bkgj,bkjd->bkgd", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(rows, heads, width).astype(q.dtype)


def attend_jax(batch: Batch, shape: Shape, platform: str) -> Calls:
    """JAX's own paged kernel on the random tables: Triton on a GPU, Mosaic on a TPU."""
    if shape.chunk > 1:
        return _attend_ragged(batch, shape)
    pages = [batch.kv_NUKSD[:, side].swapaxes(0, 1) for side in (0, 1)]  # [K, N, S, D]
    # Both kernels take a number of pages a step that divides a row's; the GPU's, of each split's.
    if platform == "gpu":
        kernel = import_kernel("jax.experimental.pallas.ops.gpu.paged_attention")
        splits = math.gcd(16, shape.row_blocks)
        step = math.gcd(8, shape.row_blocks // splits)
        options = {"k_splits": splits, "pages_per_compute_block": step}
    else:
        kernel = import_kernel("jax.experimental.pallas.ops.tpu.paged_attention")
        options = {"pages_per_compute_block": math.gcd(8, shape.row_blocks)}

    def calls(k_pages: jax.Array, v_pages: jax.Array, sets: list[Inputs]) -> list[jax.Array]:
        def call(one: Inputs) -> jax.Array:
            q_THD = one.q_THD * jnp.asarray(shape.width**-0.5, one.q_THD.dtype)
            rows = (one.table_BM, one.length_B)
            rows = rows if platform == "gpu" else rows[::-1]
            return kernel.paged_attention(q_THD, k_pages, v_pages, *rows, **options)

        return [call(one) for one in sets]

    return calls, (*pages, batch.paged)


def _attend_ragged(batch: Batch, shape: Shape) -> Calls:
    kernel = import_kernel("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    # Keys and values alternate in one axis of heads, [N, S, 2K, D].
    pages = batch.kv_NUKSD.transpose(0, 3, 2, 1, 4)
    pages = pages.reshape(*pages.shape[:2], -1, shape.width)

    def calls(pages: jax.Array, sets: list[Inputs]) -> list[jax.Array]:
        return [
            kernel.ragged_paged_attention(
                one.q_THD,
                pages,
                one.length_B,
                one.table_BM,
                one.query_start_P,
                jnp.array([shape.batch], jnp.int32),
                sm_scale=shape.width**-0.5,
            )
            for one in sets
        ]

    return calls, (pages, batch.paged)


def import_kernel(name: str) -> Any:
    """A kernel of JAX's, which may say on import that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(name)
