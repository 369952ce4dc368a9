"""Building blocks of the Hopper kernels: swizzled buffers, matrix products, copies by block.

A step of a kernel's loop attends ``tokens`` stored tokens, which lie in *pieces*: a whole block, or
where blocks are larger than a step the part of one. A piece of keys is one TMA copy, so its tokens
stand in order, and so do the pieces; tokens past the end of a row are copied from one past the
pool, which TMA fills with zeros, so what the table holds there is never dereferenced. The matrix
unit takes rows in 64s: a step's rows that no token fills stand last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.problem import Problem

MULTIPROCESSORS = 132  # of an H100 or H200
SHARED_BYTES = 227 * 1024  # that a program can have
MOST_GRID = 65535  # programs along the second axis of a launch
LOG2E = math.log2(math.e)
MATRIX_ROWS = 64  # of one wgmma instruction
SWIZZLED_COLUMNS = 64  # of a swizzled tile: 128 bytes of two-byte types, the most there is


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How the rows of one loop step are filled: piece by piece, in each head by head."""

    piece: int  # tokens of one copy
    pieces: int  # copies of keys, and as many of values
    heads: int  # key/value heads in a copy

    @property
    def tokens(self) -> int:
        return self.piece * self.pieces

    @property
    def filled(self) -> int:
        """Rows that hold a token of some head."""
        return self.tokens * self.heads

    @property
    def rows(self) -> int:
        """Rows of the matrix product."""
        return -(-self.filled // MATRIX_ROWS) * MATRIX_ROWS

    @property
    def padded(self) -> bool:
        return self.rows > self.filled

    def token_of(self, row: jax.Array) -> jax.Array:
        """The token, counted from the step's first, that a row holds."""
        if self.heads == 1:
            return row
        copied = self.heads * self.piece
        return row // copied * self.piece + row % self.piece

    def head_of(self, row: jax.Array) -> jax.Array:
        """The head, counted from the copy's first, whose token a row holds."""
        return row // self.piece % self.heads


def step_of(problem: Problem, tokens: int, heads: int = 1) -> Step:
    """The step of ``tokens`` that are whole blocks, or an equal part of one."""
    piece = min(problem.block_size, tokens)
    return Step(piece=piece, pieces=tokens // piece, heads=heads)


def interpreter(interpret: Any) -> Any:
    """What ``plgpu.kernel`` takes, from None, True or an interpreter's parameters."""
    # Its own True is an interpreter that knows no warpgroups.
    return plgpu.InterpretGPUParams() if interpret is True else interpret


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory that TMA writes and the matrix unit reads without bank conflicts.

    Tiles are 8 rows by 64 columns, of any type, so that tiles of two types hold the same elements.
    """
    size = jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, SWIZZLED_COLUMNS)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(SWIZZLED_COLUMNS * size),  # type: ignore[abstract]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def dot(a: Any, b: Any, start: jax.Array | None = None, *, interpret: Any) -> jax.Array:
    """``start + a @ b`` in f32 registers; a in registers or shared memory, b in shared memory."""
    if interpret:
        a_value = a if isinstance(a, jax.Array) else a[...]
        product = jnp.dot(a_value, b[...], preferred_element_type=jnp.float32)
        # The matrix unit reads through the async proxy, as TMA writes. Plain loads need a fence
        # before the next copy may overwrite what they read.
        plgpu.commit_smem()
        return product if start is None else start + product

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)

    if start is not None:
        return pl.run_state(multiply)(plgpu.ACC.init(start))

    def multiply_and_load(accumulator: Any) -> jax.Array:
        multiply(accumulator)
        return accumulator[...]

    return pl.run_scoped(multiply_and_load, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def rewrite(source: Any, target: Any, change: Callable[[int, jax.Array], jax.Array]) -> None:
    """Moves rows within shared memory as the matrix unit will read them, changed on the way.

    ``change(row, value)`` is given 64 rows from ``row`` on, of some columns, in the target's type.
    """
    converts = source.dtype != target.dtype
    # fp8 becomes f16 in one instruction, and bf16 by way of f32 only.
    direct = source.dtype.name.startswith("float8") and target.dtype == jnp.float16
    # Four neighbours a thread, a word of a one-byte type, or two.
    layout = plgpu.Layout.WGMMA_8BIT if converts else plgpu.Layout.WGMMA
    for row in range(0, source.shape[0], MATRIX_ROWS):
        for column in range(0, source.shape[1], SWIZZLED_COLUMNS):
            place = (pl.ds(row, MATRIX_ROWS), pl.ds(column, SWIZZLED_COLUMNS))
            value = plgpu.load(source.at[place], layout=layout)
            if converts and not direct:
                value = value.astype(jnp.float32)
            target.at[place][...] = change(row, value.astype(target.dtype))
    plgpu.commit_smem()


def piece_ids(
    problem: Problem,
    step: Step,
    table_ref: Any,
    row: jax.Array,
    first: jax.Array,
    end: jax.Array,
    pieces: range | None = None,
) -> list[jax.Array]:
    """Blocks of a step's pieces (default: all) from token ``first`` on; past ``end`` none, N."""

    def block_of(token: jax.Array) -> jax.Array:
        logical = lax.div(token, jnp.int32(problem.block_size))
        inside = table_ref[row, lax.min(logical, jnp.int32(problem.row_blocks - 1))]
        return jnp.where(token < end, inside, problem.blocks)

    return [block_of(first + piece * step.piece) for piece in pieces or range(step.pieces)]


def copy_pieces(
    problem: Problem,
    step: Step,
    kv_ref: Any,
    side: int,
    blocks: list[jax.Array],
    head: jax.Array,
    first: jax.Array,
    target_ref: Any,
    barrier: Any,
    pieces: range | None = None,
) -> None:
    """Starts copies of a step's keys (side 0) or values (1), ``barrier`` counting each.

    ``blocks`` are those of ``pieces`` (default: all), ``kv_ref`` is the pool as [N, 2 * K * S, D]:
    a slice of its rows holds any number of heads.
    """
    head_start = (side * problem.kv_heads + head) * problem.block_size
    rows = step.heads * step.piece
    for piece, block in zip(pieces or range(step.pieces), blocks, strict=True):
        start = head_start
        if step.piece < problem.block_size:
            # As a multiple of its size, for a copy must be seen to start at a swizzled tile.
            part = lax.div(first, jnp.int32(step.piece)) + piece
            start += lax.rem(part, jnp.int32(problem.block_size // step.piece)) * step.piece
        plgpu.copy_gmem_to_smem(
            kv_ref.at[block, pl.ds(start, rows)],
            target_ref.at[pl.ds(piece * rows, rows)],
            barrier,
        )


def row_scales(
    problem: Problem, table_BM: jax.Array, scale_NKS: jax.Array, extra: int
) -> jax.Array:
    """Scales of slots as [B, K, tokens + extra], in order of each row's tokens.

    Rows of a block's scales are too short for TMA, which writes 128 bytes aligned: hence a gather.
    """
    block_BM = jnp.clip(table_BM, 0, problem.blocks - 1)
    ordered = scale_NKS[block_BM].transpose(0, 2, 1, 3).reshape(problem.rows, problem.kv_heads, -1)
    return jnp.pad(ordered, ((0, 0), (0, 0), (0, extra)))


def load(source: Any, layout: Any = None) -> jax.Array:
    """A vector in registers, too short for a layout that loads at full width."""
    return plgpu.load(source, layout=layout, optimized=False)
