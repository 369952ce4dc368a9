"""Ragged prefill on Hopper: 64 or 128 packed query rows against one pass over a row's cache.

Tiles of query tokens, cut per row, times heads make programs (``prefill_plan``), whose work is in
``prefill_program``. Tiles are written whole to an array of tiles; the gather that puts tokens in
order leaves out what lies past a row's end and zeroes padding, so no program writes near another's
tokens. Cost: a read of q, two writes and a read of the output, and for each program the keys and
values its tile sees.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import query_tiles
from pallas_kernels.mosaic_gpu import parts
from pallas_kernels.mosaic_gpu.prefill_plan import (
    ALIGN,
    ROWS,
    Buffers,
    Inputs,
    Plan,
    Work,
    buffers_of,
    heads_of,
    inputs_of,
    plan_of,
    work_of,
)
from pallas_kernels.mosaic_gpu.prefill_program import Program
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

TOKENS = 64  # stored tokens of a step
MOST_STAGES = 4
COMPILER_BYTES = 4096  # of shared memory, for barriers and reductions


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """Why a ragged problem that ``backend`` accepts cannot be served with a tiling.

    Its ``heads`` and ``splits`` are for rows of one query, which go to ``decode``.
    """
    allowed = [rows // heads_of(problem) for rows in _program_rows(problem)]
    if tiling.queries not in allowed:
        return f"tiling.queries: expected one of {allowed}, got {tiling.queries}"
    if tiling.tokens != TOKENS:
        # Twice as many logits in registers and the accumulators spill.
        return f"tiling.tokens: expected {TOKENS}, got {tiling.tokens}"
    assert tiling.queries is not None
    tiles = problem.queries // tiling.queries + problem.rows
    if tiles > parts.MOST_GRID:
        return f"q_THD: expected at most {parts.MOST_GRID} tiles of a launch, got {tiles}"
    most = _most_stages(plan_of(problem, tiling))
    if not tiling.stages or tiling.stages > most:
        return f"tiling.stages: expected at most {most} in shared memory, got {tiling.stages}"
    return None


def default_tiling(problem: Problem) -> Tiling:
    """Two consumers, that share what is copied, if there is work for them on every processor."""
    heads, rows = heads_of(problem), _program_rows(problem)
    few = problem.queries * problem.query_heads < rows[-1] * parts.MULTIPROCESSORS
    short = problem.queries <= problem.rows * (rows[0] // heads)
    tiling = Tiling(
        queries=rows[0 if few or short else -1] // heads, tokens=TOKENS, heads=1, splits=1, stages=1
    )
    stages = max(1, min(MOST_STAGES, _most_stages(plan_of(problem, tiling))))
    return dataclasses.replace(tiling, stages=stages)


def _program_rows(problem: Problem) -> tuple[int, ...]:
    """Query rows a program may have. At width 256, two consumers would spill registers."""
    return (ROWS,) if problem.width > 128 else (ROWS, 2 * ROWS)


def _most_stages(plan: Plan) -> int:
    problem = plan.problem
    fixed = plan.rows * (2 * problem.width + 4)
    token_bytes = 2 + (jnp.dtype(problem.cache_dtype).itemsize if plan.converts else 0)
    return (parts.SHARED_BYTES - COMPILER_BYTES - fixed) // (
        2 * plan.step.tokens * problem.width * token_bytes
    )


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, D] in q's type and lse [T, H]; see ``ops.paged_attention``."""
    plan = plan_of(problem, tiling, interpret)
    assert operands.query_start_P is not None
    tiles = query_tiles.cut(
        operands.query_start_P,
        operands.length_B,
        queries=problem.queries,
        size=plan.queries,
        align=ALIGN,
    )
    work = work_of(plan, operands, tiles)
    out_IHQD, lse_IHQ = _launch(plan, inputs_of(plan, operands, work))

    token_T = jnp.arange(problem.queries, dtype=jnp.int32)
    tile_T = jnp.searchsorted(tiles.token_I + tiles.skip_I, token_T, side="right") - 1
    place_T = token_T - tiles.token_I[tile_T]
    live_T = (place_T < tiles.count_I[tile_T]) & (work.stop_I[tile_T] > 0)
    unseen = -jnp.inf if operands.sinks_H is None else operands.sinks_H
    return (
        jnp.where(live_T[:, None, None], out_IHQD[tile_T, :, place_T], 0),
        jnp.where(live_T[:, None], lse_IHQ[tile_T, :, place_T], unseen),
    )


def _launch(plan: Plan, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    problem = plan.problem
    (tiles,) = inputs.work.row_I.shape
    kernel = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=(
            jax.ShapeDtypeStruct((tiles, plan.programs, plan.rows, problem.width), problem.dtype),
            jax.ShapeDtypeStruct((tiles, plan.programs, plan.rows), jnp.float32),
        ),
        scratch_types=[buffers_of(plan)],
        grid=(tiles, plan.programs),
        grid_names=("tile", "program"),
        num_threads=plan.consumers + 1,
        thread_name="warpgroup",
        # Approximate tanh is off by 5e-4 of its value, too far for a logit.
        compiler_params=plgpu.CompilerParams(approx_math=problem.soft_cap is None),
        interpret=plan.interpret,
        kernel_name="paged_prefill",
    )
    out, lse = kernel(inputs)
    shape = (tiles, problem.query_heads, plan.queries)
    return out.reshape(*shape, problem.width), lse.reshape(shape)


def _body(plan: Plan, inputs: Inputs, out: Any, lse: Any, buffers: Buffers) -> None:
    # A row's last tiles see most keys: longest first, so that programs finish together.
    tile = inputs.work.row_I.shape[0] - 1 - lax.axis_index("tile")
    Program(
        plan=plan,
        inputs=inputs,
        out=out,
        lse=lse,
        buffers=buffers,
        tile=tile,
        index=lax.axis_index("program"),
        warpgroup=lax.axis_index("warpgroup"),
        work=Work(*(ref[tile] for ref in inputs.work)),
    ).run()
