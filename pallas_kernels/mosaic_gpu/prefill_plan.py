"""What a launch of the Hopper prefill kernel is made of: sizes, work list, inputs, shared memory.

A program takes a tile of one row's query tokens (``query_tiles``) times some query heads of one kv
head, head by head: row ``h * queries + t`` of a program is token t of its head h. Everything about
a tile that can be known before the launch is worked out here, an array entry a tile.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import query_tiles, visibility
from pallas_kernels.mosaic_gpu import parts
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

ROWS = parts.MATRIX_ROWS  # query rows of a consumer warpgroup
ALIGN = 8  # tokens of a swizzled tile: a copy of queries starts at a multiple
WORD = 32  # keys of a word of a draft mask


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about a launch."""

    problem: Problem
    step: parts.Step
    queries: int  # tokens of a tile, a power of two
    heads: int  # query heads of a program, a power of two
    stages: int
    interpret: Any

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return self.queries * self.heads

    @property
    def consumers(self) -> int:
        """Warpgroups that attend."""
        return self.rows // ROWS

    @property
    def programs(self) -> int:
        """Programs of a tile."""
        return self.problem.query_heads // self.heads

    @property
    def converts(self) -> bool:
        """Whether keys and values are rewritten between copy and use."""
        return self.problem.quantised or "slot" in (self.problem.k_scale, self.problem.v_scale)

    @property
    def linear(self) -> bool:
        """Whether logits are products times a positive number known now."""
        problem = self.problem
        bent = problem.soft_cap is not None or problem.alibi or problem.k_scale == "head"
        return problem.scale > 0 and not bent


class Work(NamedTuple):
    """What each tile attends, i32 [I]: keys ``begin : end`` in steps from ``key`` on.

    Steps ``full_start : full_stop`` hold no key that some query of the tile does not see.
    """

    row_I: jax.Array
    token_I: jax.Array  # first packed token, a multiple of ALIGN
    position_I: jax.Array  # of the first token in its row
    begin_I: jax.Array
    end_I: jax.Array
    key_I: jax.Array  # begin, rounded down to a copy
    full_start_I: jax.Array
    full_stop_I: jax.Array
    stop_I: jax.Array  # steps; 0 where the tile is idle or sees nothing


class Inputs(NamedTuple):
    """Arrays in device memory; None where an option is not used."""

    query: Any  # [T padded, H, D]
    cache: Any  # [N, 2 * K * S, D]
    table: Any  # [B, M]
    work: Work
    slope: Any  # f32 [programs, rows]
    sink: Any  # f32 [programs, rows], in base 2
    draft: Any  # i32 [I, words, rows]: a bit a key, from step full_stop on
    k_scale: Any  # f32 [K]; or [B, K, keys], in order of keys
    v_scale: Any


class Buffers(NamedTuple):
    """Shared memory and barriers of a program."""

    query: Any  # [consumers, 64, D], at the end the output
    keys: Any  # [stages, tokens, D]
    values: Any
    stored_keys: Any  # in the cache's type, where that is rewritten
    stored_values: Any
    lse: Any  # [consumers, 64]
    query_full: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any
    stored_keys_full: Any
    stored_values_full: Any
    cleaned: Any  # consumers that have cleaned their part of the values


def plan_of(problem: Problem, tiling: Tiling, interpret: Any = None) -> Plan:
    """The plan of a tiling whose fields are all set."""
    assert tiling.queries is not None
    assert tiling.tokens is not None
    assert tiling.stages is not None
    piece = math.gcd(problem.block_size, tiling.tokens)
    return Plan(
        problem=problem,
        step=parts.Step(piece=piece, pieces=tiling.tokens // piece, heads=1),
        queries=tiling.queries,
        heads=heads_of(problem),
        stages=tiling.stages,
        interpret=interpret,
    )


def heads_of(problem: Problem) -> int:
    """Query heads of a program: they fill rows in powers of two, and none is left over.

    No more than 8, so that a head has the 8 rows of a swizzled tile.
    """
    return math.gcd(problem.group, 8)


def work_of(plan: Plan, operands: Operands, tiles: query_tiles.QueryTiles) -> Work:
    """The work list of tiles cut at multiples of ALIGN."""
    problem, tokens = plan.problem, plan.step.tokens
    length_I = operands.length_B[tiles.row_I]
    first_I = tiles.position_I + tiles.skip_I
    last_I = tiles.position_I + tiles.count_I - 1
    begin_I, end_I = visibility.key_range(problem, length_I, first_I, last_I)
    begin_I = jnp.broadcast_to(begin_I, end_I.shape)
    # What the last query sees first and the first one last, all of them see.
    shared_begin_I, shared_end_I = visibility.key_range(problem, length_I, last_I, first_I)
    if problem.draft is not None:
        shared_end_I = jnp.minimum(shared_end_I, _context(operands)[tiles.row_I])
    key_I = begin_I // plan.step.piece * plan.step.piece
    busy_I = (tiles.count_I > 0) & (end_I > begin_I)
    stop_I = jnp.where(busy_I, -(-(end_I - key_I) // tokens), 0)
    full_stop_I = jnp.clip((shared_end_I - key_I) // tokens, 0, stop_I)
    return Work(
        row_I=tiles.row_I,
        token_I=tiles.token_I,
        position_I=tiles.position_I,
        begin_I=begin_I,
        end_I=end_I,
        key_I=key_I,
        full_start_I=jnp.clip(-(-(shared_begin_I - key_I) // tokens), 0, full_stop_I),
        full_stop_I=full_stop_I,
        stop_I=stop_I,
    )


def inputs_of(plan: Plan, operands: Operands, work: Work) -> Inputs:
    """The kernel's arrays, of which only the queries, the cache and the table are large."""
    problem = plan.problem
    # A copy takes whole swizzled tiles, of 8 tokens; engines pack into buckets that are such.
    query = jnp.pad(operands.q_THD, ((0, -problem.queries % ALIGN), (0, 0), (0, 0)))
    flat = (problem.blocks, 2 * problem.kv_heads * problem.block_size, problem.width)

    def of_rows(value_H: jax.Array | None, factor: float) -> jax.Array | None:
        if value_H is None:
            return None
        value = (value_H * factor).reshape(plan.programs, plan.heads)
        return jnp.repeat(value, plan.queries, axis=1)

    def of_keys(scale: jax.Array | None) -> jax.Array | None:
        if scale is None or scale.ndim == 1:
            return scale
        return parts.row_scales(problem, operands.table_BM, scale, plan.step.tokens)

    return Inputs(
        query=query,
        cache=operands.kv_NUKSD.reshape(flat),
        table=operands.table_BM,
        work=work,
        slope=of_rows(operands.alibi_slope_H, 1.0),
        sink=of_rows(operands.sinks_H, parts.LOG2E),
        draft=None if problem.draft is None else _draft_words(plan, operands, work),
        k_scale=of_keys(operands.k_scale),
        v_scale=of_keys(operands.v_scale),
    )


def _context(operands: Operands) -> jax.Array:
    """Tokens of each row before its queries."""
    assert operands.query_start_P is not None
    return operands.length_B - jnp.diff(operands.query_start_P)


def _draft_words(plan: Plan, operands: Operands, work: Work) -> jax.Array:
    """Which keys from step ``full_stop`` on each row sees, the draft's included."""
    problem, tokens = plan.problem, plan.step.tokens
    assert operands.draft_mask_TQ is not None
    assert problem.draft is not None
    # The first of these steps may begin almost a step before the draft, the last end so after it.
    keys = (problem.draft + 2 * (tokens - 1)) // tokens * tokens
    place = jnp.arange(plan.queries, dtype=jnp.int32)
    token = jnp.minimum(work.token_I[:, None] + place, problem.queries - 1)
    position = work.position_I[:, None] + place
    first_I = work.key_I + work.full_stop_I * tokens
    key = first_I[:, None, None] + jnp.arange(keys, dtype=jnp.int32)
    seen = visibility.visible(problem, position[..., None], key, work.end_I[:, None, None])
    nth = key - _context(operands)[work.row_I][:, None, None]
    nth_clipped = jnp.clip(nth, 0, problem.draft - 1)
    drafted = jnp.take_along_axis(operands.draft_mask_TQ[token], nth_clipped, axis=2)
    seen &= (nth < 0) | drafted  # [I, queries, keys]
    bit = seen.reshape(*seen.shape[:2], -1, WORD).astype(jnp.uint32)
    words = jnp.sum(bit << jnp.arange(WORD, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return jnp.tile(words.transpose(0, 2, 1), (1, 1, plan.heads)).astype(jnp.int32)


def buffers_of(plan: Plan) -> Buffers:
    """The types of a program's shared memory."""
    problem, step = plan.problem, plan.step
    shape = (plan.stages, step.tokens, problem.width)
    staged = parts.swizzled(shape, problem.dtype)
    copied = plgpu.Barrier(num_arrivals=step.pieces, num_barriers=plan.stages)
    freed = plgpu.Barrier(num_arrivals=plan.consumers, num_barriers=plan.stages)
    full, stored, stored_full = copied, None, None
    if plan.converts:
        full, stored_full = plgpu.Barrier(num_barriers=plan.stages), copied
        stored = parts.swizzled(shape, problem.cache_dtype)
    return Buffers(
        query=parts.swizzled((plan.consumers, ROWS, problem.width), problem.dtype),
        keys=staged,
        values=staged,
        stored_keys=stored,
        stored_values=stored,
        lse=plgpu.SMEM((plan.consumers, ROWS), jnp.float32),
        query_full=plgpu.Barrier(num_arrivals=plan.rows // min(plan.queries, ROWS)),
        keys_full=full,
        values_full=full,
        keys_free=freed,
        values_free=freed,
        stored_keys_full=stored_full,
        stored_values_full=stored_full,
        cleaned=plgpu.Barrier(num_arrivals=plan.consumers),
    )
