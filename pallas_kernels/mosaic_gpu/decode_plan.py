"""What a launch of the Hopper decode kernel is made of: sizes, arrays, shared memory, token ranges.

A program attends ``Range`` of a row for ``used`` query heads, those of ``step.heads`` key/value
heads, in columns that are padded to eights. Arrays are arranged once outside the kernel, with
slices and pads that fuse into what makes the queries; the cache and the table go in as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import visibility
from pallas_kernels.mosaic_gpu import parts
from pallas_kernels.problem import Operands, Problem
from pallas_kernels.tiling import Tiling

MIN_TOKENS = 128  # of a split, its row's last apart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything static about a launch."""

    problem: Problem
    step: parts.Step
    splits: int
    stages: int
    interpret: Any

    @property
    def used(self) -> int:
        """Query heads of a program."""
        return self.step.heads * self.problem.group

    @property
    def columns(self) -> int:
        """Columns of the matrix products: query heads, padded."""
        return -(-self.used // 8) * 8

    @property
    def stored(self) -> int:
        """Query heads of a program in device memory: TMA cuts short a tile of 8, not the last."""
        return self.used if self.used < 8 else self.columns

    @property
    def tiles(self) -> int:
        """Programs of a row and split."""
        return self.problem.kv_heads // self.step.heads

    @property
    def converts(self) -> bool:
        """Whether keys and values are rewritten between copy and use."""
        return self.problem.cache_dtype != self.problem.dtype


class Inputs(NamedTuple):
    """Arrays in device memory; None where an option is not used."""

    query: Any  # [B * tiles, stored, D]
    cache: Any  # [N, 2 * K * S, D]
    table: Any  # [B, M]
    length: Any  # [B]
    slope: Any  # f32 [tiles, columns]
    k_scale: Any  # f32 [tiles, columns]; or [B, K, tokens], in order of each row's tokens
    v_scale: Any


class Buffers(NamedTuple):
    """Shared memory and barriers of a program."""

    keys: Any  # [stages, rows, D]
    values: Any
    converted: Any  # [rows, D] in the queries' type: keys, then values
    small: Any  # a union: queries [columns, D] and weights [columns, rows]; output and lse
    query_full: Any
    keys_full: Any
    values_full: Any
    free: Any


class Range(NamedTuple):
    """Tokens that a program attends, scalars."""

    begin: jax.Array  # the row's first visible token
    end: jax.Array  # one past its last
    first: jax.Array  # the program's first, at the start of a piece
    steps: jax.Array  # the program's
    full_start: jax.Array  # steps full_start : full_stop hold no token that the row does not see
    full_stop: jax.Array


def plan_of(problem: Problem, tiling: Tiling, interpret: Any = None) -> Plan:
    """The plan of a tiling whose fields are all set."""
    assert tiling.tokens is not None
    assert tiling.heads is not None
    assert tiling.splits is not None
    assert tiling.stages is not None
    return Plan(
        problem=problem,
        step=parts.step_of(problem, tiling.tokens, tiling.heads),
        splits=tiling.splits,
        stages=tiling.stages,
        interpret=interpret,
    )


def range_of(plan: Plan, length: jax.Array, split: jax.Array) -> Range:
    """A split's share of a row: whole steps of ``MIN_TOKENS`` or more, while there are tokens."""
    step = plan.step
    begin, end = visibility.key_range(plan.problem, length, length - 1, length - 1)
    start = lax.div(begin, jnp.int32(step.piece)) * step.piece
    steps = lax.div(end - start + (step.tokens - 1), jnp.int32(step.tokens))
    share = lax.div(steps + (plan.splits - 1), jnp.int32(plan.splits))
    share = lax.max(share, jnp.int32(-(-MIN_TOKENS // step.tokens)))
    skipped = split * share
    mine = lax.max(lax.min(share, steps - skipped), jnp.int32(0))
    first = start + skipped * step.tokens
    full_start = lax.min(mine, (first < begin).astype(jnp.int32))
    full_stop = lax.min(mine, lax.div(end - first, jnp.int32(step.tokens)))
    return Range(begin, end, first, mine, full_start, lax.max(full_start, full_stop))


def inputs_of(plan: Plan, operands: Operands) -> Inputs:
    """The kernel's arrays, of which only queries, cache, table and scales a slot are large."""
    problem = plan.problem
    query = operands.q_THD.reshape(problem.rows * plan.tiles, plan.used, problem.width)
    query = jnp.pad(query, ((0, 0), (0, plan.stored - plan.used), (0, 0)))

    def of_columns(value_H: jax.Array | None) -> jax.Array | None:
        if value_H is None:
            return None
        value = value_H.reshape(plan.tiles, plan.used)
        return jnp.pad(value, ((0, 0), (0, plan.columns - plan.used)))

    def scale(value: jax.Array | None) -> jax.Array | None:
        if value is None or value.ndim == 1:
            return None if value is None else of_columns(jnp.repeat(value, problem.group))
        return parts.row_scales(problem, operands.table_BM, value, plan.step.rows)

    return Inputs(
        query=query,
        cache=operands.kv_NUKSD.reshape(problem.blocks, -1, problem.width),
        table=operands.table_BM,
        length=operands.length_B,
        slope=of_columns(operands.alibi_slope_H),
        k_scale=scale(operands.k_scale),
        v_scale=scale(operands.v_scale),
    )


def buffers_of(plan: Plan, dtype: Any) -> Buffers:
    """The types of a program's shared memory and barriers, for an output of ``dtype``."""
    problem, rows = plan.problem, plan.step.rows
    stored = parts.swizzled((plan.stages, rows, problem.width), problem.cache_dtype)
    converted = parts.swizzled((rows, problem.width), problem.dtype)
    full = plgpu.Barrier(num_arrivals=plan.step.pieces, num_barriers=plan.stages)
    return Buffers(
        keys=stored,
        values=stored,
        converted=converted if plan.converts else None,
        # A program is done with its queries when it has its output.
        small=plgpu.RefUnion(
            (
                parts.swizzled((plan.columns, problem.width), problem.dtype),
                parts.swizzled((plan.columns, rows), problem.dtype),
            ),
            (
                plgpu.SMEM((plan.columns, problem.width), dtype),
                plgpu.SMEM((plan.columns,), jnp.float32),
            ),
        ),
        query_full=plgpu.Barrier(),
        keys_full=full,
        values_full=full,
        free=plgpu.Barrier(num_barriers=plan.stages),
    )


def shared_bytes(plan: Plan) -> int:
    """Shared memory of a program, at most: buffers, barriers and what reductions take."""
    problem, rows = plan.problem, plan.step.rows
    token_bytes = 2 * plan.stages * jnp.dtype(problem.cache_dtype).itemsize + 2 * plan.converts
    column_bytes = max(2 * (problem.width + rows), 4 * (problem.width + 1))
    return rows * problem.width * token_bytes + plan.columns * column_bytes + 8192
