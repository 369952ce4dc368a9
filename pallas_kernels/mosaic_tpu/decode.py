"""Decode on a TPU: one query a row, bound by the bandwidth of its cache.

Rows run in order, and copies run ahead of them by ``stages - 1`` tiles, across rows, so that only a
core's first are waited for. What a row does not see is neither copied nor attended. At 8 heads of
128 in bf16 a tile of 256 tokens takes 23 to 28 bundles per 64 KiB of cache, its copies from 39
cycles (v7x) to 120 (v5e); a row costs some 300 bundles besides.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import visibility
from pallas_kernels.mosaic_tpu import parts
from pallas_kernels.mosaic_tpu.decode_copies import Ahead, Inputs, Scratch
from pallas_kernels.mosaic_tpu.decode_softmax import (
    Statistics,
    attend_tile,
    factors,
    nothing,
    padded_group,
)
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

TILE_BYTES = 1 << 20
MOST_TOKENS = 1024
BUFFER_BYTES = parts.VMEM_BYTES * 2 // 3  # the rest is for products


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """What tiling decode cannot serve."""
    assert tiling.tokens is not None
    assert tiling.stages is not None
    fixed = {"queries": 1, "heads": problem.kv_heads, "splits": 1}
    for name, value in fixed.items():
        if getattr(tiling, name) != value:
            return f"tiling.{name}: decode has {value}, got {getattr(tiling, name)}"
    step = parts.token_unit(problem)
    if tiling.tokens % step:
        return f"tiling.tokens: expected a multiple of {step}, got {tiling.tokens}"
    if tiling.stages < 2:
        return f"tiling.stages: expected at least 2, got {tiling.stages}"
    needed = tiling.stages * tiling.tokens * parts.token_bytes(problem)
    if needed > BUFFER_BYTES:
        return (
            f"tiling: {tiling.stages} stages of {tiling.tokens} tokens are {needed >> 20} MiB,"
            f" VMEM has room for {BUFFER_BYTES >> 20}"
        )
    return None


def default_tiling(problem: Problem) -> Tiling:
    """Tiles of about 1 MiB: less pays for latencies more often, more is padding in short rows."""
    step = parts.token_unit(problem)
    wanted = min(TILE_BYTES // parts.token_bytes(problem), MOST_TOKENS)
    return Tiling(
        queries=1,
        tokens=max(wanted // step, 1) * step,
        heads=problem.kv_heads,
        splits=1,
        stages=2,
    )


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [B, H, D] in q's type and lse [B, H]."""
    # Beside its table, a row has its length in SMEM.
    rows = max(parts.TABLE_CELLS // (problem.row_blocks + 1), 1)
    launches = []
    for first in range(0, problem.rows, rows):
        part = slice(first, first + rows)
        some = operands._replace(
            q_THD=operands.q_THD[part],
            table_BM=operands.table_BM[part],
            length_B=operands.length_B[part],
        )
        launches.append(_launch(some, problem, tiling, interpret))
    out, lse = zip(*launches, strict=True)
    return jnp.concatenate(out), jnp.concatenate(lse)


def _launch(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    K, G, D = problem.kv_heads, problem.group, problem.width
    cores, group = parts.cores(), padded_group(problem)
    R, rows = K * group, len(operands.length_B)
    # Cores take rows in turn, as many each: rows of length 0, which look up nothing, fill up.
    fill = -rows % cores
    q = operands.q_THD.reshape(rows, K, G, D)
    q = jnp.pad(q, ((0, fill), (0, 0), (0, group - G), (0, 0))).reshape(-1, R, D)
    # Nobody checks bounds: a length past the table's end would read ids from beyond it.
    length_B = jnp.clip(operands.length_B, 0, problem.row_blocks * problem.block_size)
    length_B = jnp.pad(length_B, (0, fill))
    inputs = _inputs(operands, problem, q)

    def of_row(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, R, width), lambda core, turn, *_: (turn * cores + core, 0, 0))

    hbm, column = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((R, 1), lambda *_: (0, 0))
    specs = Inputs(of_row(D), column, column, column, column, hbm, hbm, hbm)
    used = [None if array is None else spec for array, spec in zip(inputs, specs, strict=True)]
    out, lse = pl.pallas_call(
        functools.partial(_body, problem=problem, cores=cores),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, len(q) // cores),
            in_specs=[Inputs(*used)],
            out_specs=(of_row(D), of_row(1)),
            scratch_shapes=[_scratch(inputs, problem, tiling)],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((*q.shape[:2], 1), jnp.float32),
        ),
        name="paged_decode",
        compiler_params=parts.compiler_params("parallel", "arbitrary"),
        interpret=parts.interpreter(interpret),
    )(length_B, parts.flat_table(operands.table_BM, problem), inputs)
    out = out.reshape(-1, K, group, D)[:rows, :, :G].reshape(rows, -1, D)
    return out, lse.reshape(-1, K, group)[:rows, :, :G].reshape(rows, -1)


def _inputs(operands: Operands, problem: Problem, q: jax.Array) -> Inputs:
    K, G = problem.kv_heads, problem.group

    def column(value: jax.Array | None) -> jax.Array | None:
        """A number a query head, [R, 1], from [H] or [K]."""
        if value is None:
            return None
        value = jnp.broadcast_to(value.reshape(K, -1), (K, G))
        return jnp.pad(value, ((0, 0), (0, padded_group(problem) - G))).reshape(-1, 1)

    return Inputs(
        q=q,
        slope=column(operands.alibi_slope_H),
        sink=column(operands.sinks_H),
        k_factor=column(operands.k_scale if problem.k_scale == "head" else None),
        v_factor=column(operands.v_scale if problem.v_scale == "head" else None),
        kv=operands.kv_NUKSD,
        k_scale=operands.k_scale if problem.k_scale == "slot" else None,
        v_scale=operands.v_scale if problem.v_scale == "slot" else None,
    )


def _scratch(inputs: Inputs, problem: Problem, tiling: Tiling) -> Scratch:
    tile = parts.tile_shape(problem, tiling)
    stages, blocks = tile[:2]

    def slot_scales(pool: jax.Array | None) -> Any:
        return None if pool is None else pltpu.VMEM((stages, blocks, *pool.shape[1:]), pool.dtype)

    return Scratch(
        kv=pltpu.VMEM(tile, inputs.kv.dtype),
        k_scale=slot_scales(inputs.k_scale),
        v_scale=slot_scales(inputs.v_scale),
        semaphore=pltpu.SemaphoreType.DMA((stages,)),
        cursor=pltpu.SMEM((4,), jnp.int32),
    )


def _body(
    length: Any,
    table: Any,
    inputs: Inputs,
    out: Any,
    lse: Any,
    scratch: Scratch,
    *,
    problem: Problem,
    cores: int,
) -> None:
    core, turn = pl.program_id(0), pl.program_id(1)
    row = turn * cores + core
    pools = (inputs.kv, inputs.k_scale, inputs.v_scale)
    buffers = (scratch.kv, scratch.k_scale, scratch.v_scale)
    fetch = parts.Fetch(
        problem=problem,
        table=table,
        pools=tuple(pool for pool in pools if pool is not None),
        buffers=tuple(buffer for buffer in buffers if buffer is not None),
        semaphore=scratch.semaphore,
    )
    ahead = Ahead(problem, cores, length, fetch, scratch.cursor)
    pl.when(turn == 0)(lambda: ahead.begin(core))
    first, last = ahead.blocks(row)
    position = length[row] - 1
    begin, end = visibility.key_range(problem, length[row], position, position)
    q = factors(problem, inputs.q[0])

    def step(nth: jax.Array, before: Statistics) -> Statistics:
        stage = ahead.next()
        block = first + nth * fetch.blocks
        fetch.wait(stage, jnp.minimum(last - block, fetch.blocks))
        at = block * problem.block_size
        whole = (at >= begin) & (at + parts.tokens(scratch.kv) <= end)
        pl.when(~whole)(lambda: fetch.zero_values(stage, at, begin, end))
        return attend_tile(problem, inputs, scratch, q, stage, at, length[row], before)

    tiles = parts.ceil_quotient(last - first, fetch.blocks)
    most, total, sum_ = lax.fori_loop(0, tiles, step, nothing(inputs))
    total = jnp.sum(total, axis=1, keepdims=True)
    result = sum_ / jnp.where(total > 0, total, 1.0)
    if inputs.v_factor is not None:
        result *= inputs.v_factor[...]
    out[0] = result.astype(out.dtype)
    lse[0] = most + jnp.log(total)
