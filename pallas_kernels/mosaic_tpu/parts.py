"""What the TPU kernels share: blocks fetched by table index into VMEM, and heads of a tile.

A tile is one row's stored tokens in one stage of a buffer, whole blocks in the order of the row.
Blocks that hold nothing anybody sees are not fetched, so part of a tile may be stale memory: logits
mask its keys, and its values must be zeroed, for 0 * NaN is NaN. Buffers keep the axis of blocks
apart from that of slots: a copy then ends on a register tile's edge in every type, which inside a
[tokens, D] matrix it does not (16 slots of int8 are half a tile).
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
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.problem import Problem
from pallas_kernels.tiling import Tiling

LANES = 128
SUBLANES = 8
TABLE_CELLS = 1 << 17  # of a launch: half of SMEM
VMEM_BYTES = 48 << 20  # of a launch; no chip since v5e has less than 64 MiB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Copies of a row's blocks into the stages of buffers. Fields but the first hold refs."""

    problem: Problem
    table: Any  # SMEM, i32 [rows * M], ids in the pool: two axes would be padded to whole tiles
    pools: tuple[Any, ...]  # HBM, [N, ...]: keys and values, then what else blocks have
    buffers: tuple[Any, ...]  # VMEM, [stages, blocks of a tile, ...]: one a pool
    semaphore: Any  # [stages]

    @property
    def blocks(self) -> int:
        """Blocks of a tile."""
        return self.buffers[0].shape[1]

    def start(self, stage: Any, row: Any, first: Any, live: Any, skip: Any = 0) -> None:
        """Begin to fetch blocks ``skip..live`` of the tile at logical block ``first`` of a row."""
        cell = row * self.problem.row_blocks + first

        def copy(nth: Any) -> None:
            block = self.table[cell + nth]
            for pool, buffer in zip(self.pools, self.buffers, strict=True):
                self._copy(pool.at[block], buffer.at[stage, nth], stage).start()

        # A copy takes four bundles to issue, in a loop three times as many.
        @pl.when(live - skip == self.blocks)
        def _() -> None:
            for nth in range(self.blocks):
                copy(jnp.int32(nth))  # a Python int is of 64 bits under jax_enable_x64

        @pl.when(live - skip != self.blocks)
        def _() -> None:
            _for(skip, live, copy)

    def wait(self, stage: Any, live: Any, skip: Any = 0) -> None:
        """Wait for blocks ``skip..live`` of a stage, all at once where they are the whole tile."""

        def block(nth: Any) -> None:
            for buffer in self.buffers:
                self._copy(buffer.at[stage, nth], buffer.at[stage, nth], stage).wait()

        @pl.when(live - skip == self.blocks)
        def _() -> None:
            for buffer in self.buffers:
                self._copy(buffer.at[stage], buffer.at[stage], stage).wait()

        @pl.when(live - skip != self.blocks)
        def _() -> None:
            _for(skip, live, block)

    def zero_values(self, stage: Any, position: Any, begin: Any, end: Any) -> None:
        """Zero a stage's values outside positions ``begin..end``; its first is ``position``."""
        size = self.problem.block_size
        slot = lax.broadcasted_iota(jnp.int32, (1, size, 1), 1)

        def zero(nth: Any) -> None:
            at = position + nth * size + slot
            block = self.buffers[0].at[stage, nth, 1]
            value = block[...]
            block[...] = jnp.where((begin <= at) & (at < end), value, jnp.zeros_like(value))

        before = ceil_quotient(jnp.maximum(begin - position, 0), size)
        after = quotient(jnp.maximum(end - position, 0), size)
        _for(0, before, zero)
        _for(jnp.maximum(before, after), self.blocks, zero)

    def _copy(self, source: Any, target: Any, stage: Any) -> Any:
        return pltpu.make_async_copy(source, target, self.semaphore.at[stage])


def cores() -> int:
    """Tensor cores that run one launch: two on a chip that is one device (v4, v5p)."""
    return pltpu.get_tpu_info().num_cores if pltpu.is_tpu_device() else 1


def compiler_params(*semantics: Any) -> pltpu.CompilerParams:
    """Without bounds checks, 10 bundles a copy: tables are clipped, and dead blocks not copied."""
    return pltpu.CompilerParams(
        dimension_semantics=semantics, disable_bounds_checks=True, vmem_limit_bytes=VMEM_BYTES
    )


def interpreter(interpret: Any) -> Any:
    """What ``pl.pallas_call`` takes, from None, True or an interpreter's parameters."""
    return pltpu.InterpretParams() if interpret is True else interpret or False


def token_bytes(problem: Problem) -> int:
    """Bytes of a token's keys and values in VMEM."""
    lanes = -(-problem.width // LANES) * LANES
    return 2 * problem.kv_heads * lanes * jnp.dtype(problem.cache_dtype).itemsize


def token_unit(problem: Problem) -> int:
    """What the tokens of a tile are a multiple of: whole blocks, and whole rows of logits."""
    return math.lcm(problem.block_size, LANES)


def tile_shape(problem: Problem, tiling: Tiling) -> tuple[int, ...]:
    """Shape of the buffer of keys and values."""
    assert tiling.tokens is not None
    assert tiling.stages is not None
    blocks = tiling.tokens // problem.block_size
    return (tiling.stages, blocks, 2, problem.kv_heads, problem.block_size, problem.width)


def tokens(buffer: Any) -> int:
    """Tokens of a tile."""
    return buffer.shape[1] * buffer.shape[4]


def flat_table(table_BM: jax.Array, problem: Problem) -> jax.Array:
    """The table for SMEM. Nobody checks bounds there: an id outside the pool would halt a core."""
    return jnp.clip(table_BM, 0, problem.blocks - 1).reshape(-1)


def head(buffer: Any, stage: Any, side: int, head: Any, problem: Problem) -> jax.Array:
    """Keys (side 0) or values (1) of one head of a tile, [tokens, D] in the type of products."""
    tile = buffer[stage, :, side, head]
    compute = compute_type(problem)
    if problem.block_size % (SUBLANES * 4 // compute.itemsize):
        # Blocks are no whole register tiles of the products' type, but they are of f32.
        tile = tile.astype(jnp.float32)
    elif compute.itemsize < 4:
        tile = tile.astype(compute)
    return tile.reshape(-1, problem.width).astype(compute)


def compute_type(problem: Problem) -> jnp.dtype:
    """Type of the products' factors: f32 where either side is, else bf16, exact for 8 bits."""
    wide = "float32" in (problem.dtype, problem.cache_dtype)
    return jnp.dtype(jnp.float32 if wide else jnp.bfloat16)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product in f32; of f32 factors by six passes of bf16, the unit's default being one."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (contract[:1], contract[1:])
    return lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def quotient(a: Any, b: int) -> Any:
    """``a // b`` of an ``a`` from 0 on: a sign costs the scalar unit five bundles more."""
    return lax.div(a.astype(jnp.uint32), jnp.uint32(b)).astype(jnp.int32)


def ceil_quotient(a: Any, b: int) -> Any:
    """How many ``b`` cover an ``a`` from 0 on."""
    return quotient(a + (b - 1), b)


def _for(begin: Any, end: Any, do: Callable[[Any], None]) -> None:
    lax.fori_loop(begin, end, lambda nth, _: do(nth), None)
