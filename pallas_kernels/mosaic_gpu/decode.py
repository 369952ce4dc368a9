"""Decode on Hopper: one query a row, each head's cache split over programs and merged.

A program attends some stored tokens of a row for the query heads of one key/value head, or of
several where their blocks are small (``decode_program``). Splits of a row write normalised outputs
in f32 and their lse, which ``merge_splits`` puts together (Dao et al., Flash-Decoding, 2023); one
split writes the output itself. Cost: each visible block of keys and values is read once; a split
adds a write and a read of the outputs in f32.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import merge
from pallas_kernels.mosaic_gpu import parts
from pallas_kernels.mosaic_gpu.decode_plan import (
    MIN_TOKENS,
    Buffers,
    Inputs,
    buffers_of,
    inputs_of,
    plan_of,
    range_of,
    shared_bytes,
)
from pallas_kernels.mosaic_gpu.decode_program import Program
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

COPY_BYTES = 4096  # of a TMA copy worth its issue
STAGE_BYTES = 16384  # of keys, and as many of values
MOST_OUT = 128 * 64  # output elements of a program, 64 registers a thread
MOST_SPLITS = 128


def default_tiling(problem: Problem) -> Tiling:
    """Tiles of 64 rows or more, 16 KiB of keys, and splits that fill the device."""
    size = jnp.dtype(problem.cache_dtype).itemsize
    rows = max(parts.MATRIX_ROWS, min(128, STAGE_BYTES // (2 * problem.width)))
    heads = _default_heads(problem)
    return Tiling(
        queries=1,
        tokens=_most_tokens(problem.block_size, rows // heads),
        heads=heads,
        splits=_default_splits(problem, problem.rows * problem.kv_heads // heads),
        stages=4 if size == 1 and problem.width < 256 else 2,
    )


def _default_heads(problem: Problem) -> int:
    """Heads whose blocks make a copy worth its issue, as far as their queries fit 8 columns."""
    if "slot" in (problem.k_scale, problem.v_scale):
        return 1
    heads = 1
    size = problem.block_size * problem.width * jnp.dtype(problem.cache_dtype).itemsize
    while (
        size * heads < COPY_BYTES
        and problem.kv_heads % (2 * heads) == 0
        and problem.group * 2 * heads <= 8
    ):
        heads *= 2
    return heads


def _most_tokens(block_size: int, limit: int) -> int:
    """The most tokens up to a limit that are whole blocks, or equal parts of one."""
    if block_size <= limit:
        return limit // block_size * block_size
    return next(
        (tokens for tokens in range(limit, 8, -8) if block_size % tokens == 0), min(block_size, 8)
    )


def _default_splits(problem: Problem, programs: int) -> int:
    """The smallest count that nearly fills whole waves of the device, one program an SM.

    One SM's bandwidth needs no more than a program's buffers in flight. Counts within 85% of the
    best are as good, and 80% of the SMs busy is enough not to pay for a merge.
    """
    tokens = problem.row_blocks * problem.block_size
    if problem.window is not None:
        tokens = min(tokens, problem.window)
    most = min(max(tokens // MIN_TOKENS, 1), MOST_SPLITS)
    if programs >= 0.8 * parts.MULTIPROCESSORS:
        return 1

    def efficiency(splits: int) -> float:
        waves = programs * splits / parts.MULTIPROCESSORS
        return waves / math.ceil(waves)

    best = max(efficiency(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if efficiency(splits) >= 0.85 * best)


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """Why a decode problem that ``backend`` accepts cannot be served with a tiling."""
    assert tiling.tokens is not None
    assert tiling.heads is not None
    most = MOST_OUT // problem.width
    if problem.group > most:
        return f"q_THD: expected at most {most} query heads a kv head, got {problem.group}"
    if problem.rows > parts.MOST_GRID:
        return f"q_THD: expected at most {parts.MOST_GRID} decoding rows, got {problem.rows}"
    if tiling.queries != 1:
        return f"tiling.queries: a decoding row has 1, got {tiling.queries}"
    refused = _heads_refusal(problem, tiling.heads)
    refused = refused or _tokens_refusal(problem, tiling.tokens, tiling.heads)
    if refused:
        return refused
    plan = plan_of(problem, tiling)
    if (used := shared_bytes(plan)) > parts.SHARED_BYTES:
        return f"tiling.stages: {used} bytes of shared memory, a program has {parts.SHARED_BYTES}"
    return None


def _heads_refusal(problem: Problem, heads: int) -> str | None:
    most = MOST_OUT // problem.width // problem.group
    if problem.kv_heads % heads or heads > most:
        return (
            f"tiling.heads: expected a divisor of {problem.kv_heads} kv heads, at most {most},"
            f" got {heads}"
        )
    if heads > 1 and "slot" in (problem.k_scale, problem.v_scale):
        return f"tiling.heads: expected 1 with a scale for each slot, got {heads}"
    return None


def _tokens_refusal(problem: Problem, tokens: int, heads: int) -> str | None:
    size = problem.block_size
    if tokens % 8 or (tokens % size and size % tokens):
        return (
            f"tiling.tokens: expected a multiple of 8 that is whole blocks of {size} slots or an"
            f" equal part of one, got {tokens}"
        )
    if heads > 1 and tokens < size:
        return f"tiling.heads: expected 1 where a step is part of a block, got {heads}"
    return None


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [B, H, D] and lse [B, H] of a decode problem that ``refusal`` accepts."""
    plan = plan_of(problem, tiling, interpret)
    direct = plan.splits == 1 and not problem.sinks
    dtype = jnp.dtype(problem.dtype if direct else jnp.float32)

    def body(inputs: Inputs, out: Any, lse: Any, buffers: Buffers) -> None:
        split, row, tile = (lax.axis_index(name) for name in ("split", "row", "tile"))
        Program(
            plan=plan,
            inputs=inputs,
            out=out,
            lse=lse,
            buffers=buffers,
            split=split,
            row=row,
            tile=tile,
            tokens=range_of(plan, inputs.length[row], split),
        ).run(lax.axis_index("role"))

    places = problem.rows * plan.tiles
    out, lse = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((plan.splits, places, plan.stored, problem.width), dtype),
            jax.ShapeDtypeStruct((plan.splits, places, plan.columns), jnp.float32),
        ],
        # Heads last: programs that start together read a block from end to end.
        grid=(plan.splits, problem.rows, plan.tiles),
        grid_names=("split", "row", "tile"),
        num_threads=2,
        thread_name="role",
        scratch_types=[buffers_of(plan, dtype)],
        # Approximate tanh is off by 5e-4 of a soft cap, too far for a logit.
        compiler_params=plgpu.CompilerParams(approx_math=problem.soft_cap is None),
        interpret=interpret,
        kernel_name="paged_decode",
    )(inputs_of(plan, operands))
    shape = (plan.splits, problem.rows, problem.query_heads)
    out = out[:, :, : plan.used].reshape(*shape, problem.width)
    lse = lse[:, :, : plan.used].reshape(shape)
    if direct:
        return out[0], lse[0]
    out, lse = merge.merge_splits(out, lse, dtype=jnp.float32)
    if operands.sinks_H is not None:
        out, lse = merge.add_sinks(out, lse, operands.sinks_H)
    return out.astype(problem.dtype), lse
