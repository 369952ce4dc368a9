"""Ragged prefill on a TPU: tiles of one row's queries, bound by the matrix unit.

A tile's queries of one key/value head are the rows of a product, ``[queries * G, D]`` against
``[tokens, D]``. Blocks that no query of the tile sees are not fetched, and steps that all of its
queries see whole are not masked. Copies run one step ahead and across tiles, so only a core's first
are waited for. With 512 rows and 512 tokens a step takes as long as its products where the unit is
128 wide (v5e, v5p) and 1.4 times as long where it is 256 wide and a head of 128 fills half of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import packing, parts, prefill_copies, prefill_softmax
from pallas_kernels.mosaic_tpu.prefill_copies import Copies, Inputs, Scratch
from pallas_kernels.mosaic_tpu.prefill_softmax import LOG2E, Step
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

ROWS = 512  # of a tile: with fewer, keys and values come slower than they are used
TOKENS = 512  # of a step: fewer pay more often for latencies, of more the diagonal masks more


def refusal(problem: Problem, tiling: Tiling) -> str | None:
    """What tiling prefill cannot serve: no copy and no register tile could start there."""
    assert tiling.queries is not None
    assert tiling.tokens is not None
    piece, step = _units(problem)
    if tiling.queries % piece:
        return f"tiling.queries: expected a multiple of {piece}, got {tiling.queries}"
    if tiling.tokens % step:
        return f"tiling.tokens: expected a multiple of {step}, got {tiling.tokens}"
    fixed = {"heads": problem.kv_heads, "splits": 1, "stages": 2}
    for name, value in fixed.items():
        if getattr(tiling, name) != value:
            return f"tiling.{name}: prefill has {value}, got {getattr(tiling, name)}"
    needed = prefill_copies.vmem_bytes(problem, tiling)
    if needed > parts.VMEM_BYTES:
        return (
            f"tiling: {tiling.queries} queries and {tiling.tokens} tokens need {needed >> 20} MiB"
            f" of VMEM, expected at most {parts.VMEM_BYTES >> 20}"
        )
    return None


def default_tiling(problem: Problem) -> Tiling:
    """``ROWS`` against ``TOKENS``, or as much of it as a row may have and as fits into VMEM."""
    piece, step = _units(problem)
    most = problem.queries if problem.draft is None else problem.draft
    rows, tokens = min(-(-most // piece) * piece * problem.group, ROWS), TOKENS
    while True:
        tiling = Tiling(
            queries=max(rows // (problem.group * piece), 1) * piece,
            tokens=max(tokens // step, 1) * step,
            heads=problem.kv_heads,
            splits=1,
            stages=2,
        )
        smallest = (tiling.queries, tiling.tokens) == (piece, step)
        if smallest or prefill_copies.vmem_bytes(problem, tiling) <= parts.VMEM_BYTES:
            return tiling
        rows, tokens = (rows // 2, tokens) if rows >= tokens else (rows, tokens // 2)


def _units(problem: Problem) -> tuple[int, int]:
    """What the queries of a tile and the tokens of a step are multiples of."""
    return packing.piece_tokens(problem), parts.token_unit(problem)


def attend(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Output [T, H, D] in q's type and lse [T, H] of a ragged batch."""
    assert operands.query_start_P is not None
    T, H, D = problem.queries, problem.query_heads, problem.width
    nothing = -jnp.inf if operands.sinks_H is None else operands.sinks_H
    out_THD = jnp.zeros((T, H, D), operands.q_THD.dtype)
    lse_TH = jnp.broadcast_to(nothing, (T, H)).astype(jnp.float32)
    # Beside its table, a row has a tile or more in the work list.
    rows = max(parts.TABLE_CELLS // (problem.row_blocks + len(packing.Work._fields)), 1)
    for first in range(0, problem.rows, rows):
        part = operands._replace(
            table_BM=operands.table_BM[first : first + rows],
            length_B=operands.length_B[first : first + rows],
            query_start_P=operands.query_start_P[first : first + rows + 1],
        )
        owned_T, part_out_THD, part_lse_TH = _attend_rows(part, problem, tiling, interpret)
        out_THD = jnp.where(owned_T[:, None, None], part_out_THD, out_THD)
        lse_TH = jnp.where(owned_T[:, None], part_lse_TH, lse_TH)
    return out_THD, lse_TH


def _attend_rows(
    operands: Operands, problem: Problem, tiling: Tiling, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which tokens see something, bool [T], and their results; anything where they do not."""
    assert tiling.queries is not None
    assert tiling.tokens is not None
    work = packing.cut(operands, problem, tiling.queries, cores=parts.cores())
    places = packing.place(work, problem, tiling.queries)
    k_factor, k_scale = packing.unpack_scale(
        operands.k_scale, problem.k_scale, operands, problem, tiling.tokens
    )
    v_factor, v_scale = packing.unpack_scale(
        operands.v_scale, problem.v_scale, operands, problem, tiling.tokens
    )
    inputs = Inputs(
        q=packing.pack_queries(operands.q_THD, places, problem),
        kv=operands.kv_NUKSD,
        k_factor=k_factor * (problem.scale * LOG2E),
        v_factor=v_factor,
        k_scale=k_scale,
        v_scale=v_scale,
        draft=packing.pack_draft_mask(operands, work, places, problem, tiling.tokens),
        slope=_per_row(operands.alibi_slope_H, problem, tiling),
        sink=_per_row(operands.sinks_H, problem, tiling),
    )
    out, lse = _launch(work, operands.table_BM, inputs, problem, tiling, interpret)
    return places.owned_T, *packing.unpack(out, lse, places, problem)


def _per_row(value_H: jax.Array | None, problem: Problem, tiling: Tiling) -> jax.Array | None:
    """A constant of every query head for every row of a tile, in base 2 and in all lanes."""
    if value_H is None:
        return None
    value = (LOG2E * value_H).reshape(problem.kv_heads, 1, problem.group, 1)
    shape = (problem.kv_heads, tiling.queries, problem.group, parts.LANES)
    return jnp.broadcast_to(value, shape).reshape(problem.kv_heads, -1, parts.LANES)


def _launch(
    work: packing.Work,
    table_BM: jax.Array,
    inputs: Inputs,
    problem: Problem,
    tiling: Tiling,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Packed outputs [K, packed rows, D] and lse [I, K, 1, R]; anything where no token lies."""
    cores = parts.cores()
    tiles = len(work.row_I) - cores
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    lse_shape = (tiles, problem.kv_heads, 1, prefill_copies.rows_of(problem, tiling))
    return pl.pallas_call(
        functools.partial(_body, problem=problem),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, tiles // cores),
            in_specs=[inputs.specs()],
            out_specs=(hbm, hbm),
            scratch_shapes=[prefill_copies.scratch(inputs, problem, tiling)],
        ),
        out_shape=(
            jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        name="paged_prefill",
        compiler_params=parts.compiler_params("parallel", "arbitrary"),
        interpret=parts.interpreter(interpret),
    )(work, parts.flat_table(table_BM, problem), inputs)


def _body(
    work: packing.Work,
    table: Any,
    inputs: Inputs,
    out: Any,
    lse: Any,
    scratch: Scratch,
    *,
    problem: Problem,
) -> None:
    """A core's next tile. Cores take tiles in turn, so each has about the same to do."""
    turn, cores = pl.program_id(1), pl.num_programs(0)
    tile = turn * cores + pl.program_id(0)
    following, side = tile + cores, turn & 1
    copies = Copies(problem, work, table, inputs, out, lse, scratch)

    @pl.when((turn == 0) & (work.count_I[tile] > 0))
    def _() -> None:
        start = jnp.int32(0)  # a Python int is of 64 bits under jax_enable_x64
        scratch.stage[0] = start
        copies.start_queries(tile, start)
        copies.start_keys(tile, copies.steps(tile)[0], start)

    @pl.when(work.count_I[tile] > 0)
    def _() -> None:
        pl.when(work.count_I[following] > 0)(lambda: copies.start_queries(following, 1 - side))
        prefill_softmax.begin(inputs, scratch)
        copies.wait_queries(tile, side)
        first, last = copies.steps(tile)

        def attend_step(step: jax.Array, stage: jax.Array) -> jax.Array:
            ends = step + 1 == last
            ahead = jnp.where(ends, following, tile)
            next_step = jnp.where(ends, copies.steps(following)[0], step + 1)
            pl.when(work.count_I[ahead] > 0)(lambda: copies.start_keys(ahead, next_step, 1 - stage))
            copies.wait_keys(tile, step, stage)
            Step(problem, work, inputs, scratch, tile, step, side, stage).attend()
            return 1 - stage

        scratch.stage[0] = lax.fori_loop(first, last, attend_step, scratch.stage[0])
        pl.when(turn > 0)(lambda: copies.wait_results(tile - cores))
        prefill_softmax.end(inputs, scratch)
        copies.start_results(tile)
        pl.when(work.count_I[following] == 0)(lambda: copies.wait_results(tile))
