"""What a prefill tile keeps in memory, and the copies that bring it there and back.

A copy is described by the work list alone, so it is waited for as it was started: the next tile's
queries a tile ahead, keys and values a step ahead, a tile's results a tile later. R = queries * G
rows of a tile, a token's G query heads side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mosaic_tpu import packing, parts
from pallas_kernels.problem import Problem
from pallas_kernels.tiling import Tiling


class Inputs(NamedTuple):
    """Arrays of a launch; None where an option is not used."""

    q: Any  # HBM, [K, packed rows, D]
    kv: Any  # HBM, [N, 2, K, S, D]
    k_factor: Any  # SMEM, [K]: of products, makes them logits in base 2
    v_factor: Any  # SMEM, [K]: of outputs
    k_scale: Any  # HBM, [B, steps, K, 1, tokens]
    v_scale: Any  # HBM, [B, steps, K, 1, tokens]
    draft: Any  # HBM, i8 [draft steps, packed rows, tokens]
    slope: Any  # VMEM, [K, R, lanes], in base 2
    sink: Any  # VMEM, [K, R, lanes], in base 2

    def specs(self) -> Inputs:
        """Where the arrays are."""
        hbm, smem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
        vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        specs = Inputs(hbm, hbm, smem, smem, hbm, hbm, hbm, vmem, vmem)
        used = zip(specs, self, strict=True)
        return Inputs(*(None if array is None else spec for spec, array in used))


class Scratch(NamedTuple):
    """A tile's memory in VMEM; what is copied into has two sides."""

    q: Any  # [2, K, R, D]
    kv: Any  # [2, blocks of a step, 2, K, S, D]
    k_scale: Any  # [2, K, 1, tokens]
    v_scale: Any  # [2, K, 1, tokens]
    draft: Any  # [2, draft steps, R, tokens]
    most: Any  # [K, R, lanes]: the same in every lane
    total: Any  # [K, R, lanes]: a part of the sum of weights in every lane
    sum: Any  # [K, R, D]: of weighted values
    out: Any  # [K, R, D]
    lse: Any  # [K, 1, R]
    stage: Any  # SMEM, [1]: where the tile's first step finds its keys
    q_semaphore: Any  # [2]
    kv_semaphore: Any  # [2]
    scale_semaphore: Any  # [2]
    out_semaphore: Any


def scratch(inputs: Inputs, problem: Problem, tiling: Tiling) -> Scratch:
    """Types of a launch's scratch."""
    K, D, rows, tokens = problem.kv_heads, problem.width, rows_of(problem, tiling), tiling.tokens

    def twice(array: jax.Array | None, *shape: Any) -> Any:
        return None if array is None else pltpu.VMEM((2, *shape), array.dtype)

    statistic = pltpu.VMEM((K, rows, parts.LANES), jnp.float32)
    draft_steps = 0 if inputs.draft is None else len(inputs.draft)
    return Scratch(
        q=twice(inputs.q, K, rows, D),
        kv=pltpu.VMEM(parts.tile_shape(problem, tiling), inputs.kv.dtype),
        k_scale=twice(inputs.k_scale, K, 1, tokens),
        v_scale=twice(inputs.v_scale, K, 1, tokens),
        draft=twice(inputs.draft, draft_steps, rows, tokens),
        most=statistic,
        total=statistic,
        sum=pltpu.VMEM((K, rows, D), jnp.float32),
        out=pltpu.VMEM((K, rows, D), inputs.q.dtype),
        lse=pltpu.VMEM((K, 1, rows), jnp.float32),
        stage=pltpu.SMEM((1,), jnp.int32),
        q_semaphore=pltpu.SemaphoreType.DMA((2,)),
        kv_semaphore=pltpu.SemaphoreType.DMA((2,)),
        scale_semaphore=pltpu.SemaphoreType.DMA((2,)),
        out_semaphore=pltpu.SemaphoreType.DMA,
    )


def rows_of(problem: Problem, tiling: Tiling) -> int:
    """Rows of a tile, R."""
    assert tiling.queries is not None
    return tiling.queries * problem.group


def vmem_bytes(problem: Problem, tiling: Tiling) -> int:
    """About what a launch needs of VMEM: its scratch, its constants, two heads' logits."""
    assert tiling.queries is not None
    assert tiling.tokens is not None
    rows, lanes = rows_of(problem, tiling), -(-problem.width // parts.LANES) * parts.LANES
    q = 3 * lanes * jnp.dtype(problem.dtype).itemsize  # two sides and the output
    statistics = 4 * (lanes + parts.LANES * (2 + problem.sinks + problem.alibi))
    scales = 8 * (problem.k_scale == "slot") + 8 * (problem.v_scale == "slot")
    draft = 0 if problem.draft is None else 2 * (-(-problem.draft // tiling.tokens) + 1)
    return (
        problem.kv_heads * rows * (q + statistics)
        + tiling.tokens * (2 * parts.token_bytes(problem) + problem.kv_heads * scales)
        + rows * tiling.tokens * (draft + 2 * (4 + 2))
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """A tile's copies. Each is waited for as it was started, from the same work list."""

    problem: Problem
    work: packing.Work
    table: Any
    inputs: Inputs
    out: Any
    lse: Any
    scratch: Scratch

    @property
    def fetch(self) -> parts.Fetch:
        return parts.Fetch(
            problem=self.problem,
            table=self.table,
            pools=(self.inputs.kv,),
            buffers=(self.scratch.kv,),
            semaphore=self.scratch.kv_semaphore,
        )

    @property
    def piece_rows(self) -> int:
        return packing.piece_tokens(self.problem) * self.problem.group

    def steps(self, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A tile's first step over its row's tokens, and one past its last."""
        tokens = parts.tokens(self.scratch.kv)
        begin, end = self.work.begin_I[tile], self.work.end_I[tile]
        return parts.quotient(begin, tokens), parts.ceil_quotient(end, tokens)

    def _blocks(self, tile: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One past the last block of a step that holds something to see, and the first."""
        size, blocks = self.problem.block_size, self.fetch.blocks
        live = jnp.minimum(parts.ceil_quotient(self.work.end_I[tile], size) - step * blocks, blocks)
        return live, jnp.maximum(parts.quotient(self.work.begin_I[tile], size) - step * blocks, 0)

    def start_keys(self, tile: jax.Array, step: jax.Array, stage: jax.Array) -> None:
        row = self.work.row_I[tile]
        live, skip = self._blocks(tile, step)
        self.fetch.start(stage, row, step * self.fetch.blocks, live, skip)
        self._each_scale(row, step, stage, lambda copy: copy.start())

    def wait_keys(self, tile: jax.Array, step: jax.Array, stage: jax.Array) -> None:
        """After this, values that nobody sees are 0 in the stage."""
        live, skip = self._blocks(tile, step)
        self.fetch.wait(stage, live, skip)
        position = step * parts.tokens(self.scratch.kv)
        self.fetch.zero_values(stage, position, self.work.begin_I[tile], self.work.end_I[tile])
        self._each_scale(self.work.row_I[tile], step, stage, lambda copy: copy.wait())

    def _each_scale(
        self, row: jax.Array, step: jax.Array, stage: jax.Array, do: Callable[[Any], None]
    ) -> None:
        for source, target in (
            (self.inputs.k_scale, self.scratch.k_scale),
            (self.inputs.v_scale, self.scratch.v_scale),
        ):
            if source is not None:
                semaphore = self.scratch.scale_semaphore.at[stage]
                do(pltpu.make_async_copy(source.at[row, step], target.at[stage], semaphore))

    def start_queries(self, tile: jax.Array, side: jax.Array) -> None:
        self._each_query(tile, side, lambda copy: copy.start())

    def wait_queries(self, tile: jax.Array, side: jax.Array) -> None:
        self._each_query(tile, side, lambda copy: copy.wait())

    def _each_query(self, tile: jax.Array, side: jax.Array, do: Callable[[Any], None]) -> None:
        first = pl.multiple_of(self.work.piece_I[tile] * self.piece_rows, packing.REGISTER_ROWS)
        for source, target in (
            (self.inputs.q, self.scratch.q),
            (self.inputs.draft, self.scratch.draft),
        ):
            if source is not None:
                rows = source.at[:, pl.ds(first, target.shape[2])]
                semaphore = self.scratch.q_semaphore.at[side]
                do(pltpu.make_async_copy(rows, target.at[side], semaphore))

    def start_results(self, tile: jax.Array) -> None:
        self._each_result(tile, lambda copy: copy.start())

    def wait_results(self, tile: jax.Array) -> None:
        self._each_result(tile, lambda copy: copy.wait())

    def _each_result(self, tile: jax.Array, do: Callable[[Any], None]) -> None:
        """Whole pieces, up to the last token's: what follows is another tile's."""
        scratch, semaphore = self.scratch, self.scratch.out_semaphore
        pieces = parts.ceil_quotient(self.work.count_I[tile], packing.piece_tokens(self.problem))

        def rows(piece: jax.Array) -> Any:
            start = pl.multiple_of(piece * self.piece_rows, packing.REGISTER_ROWS)
            return pl.ds(start, self.piece_rows)

        def one(nth: jax.Array, _: None) -> None:
            target = self.out.at[:, rows(self.work.piece_I[tile] + nth)]
            do(pltpu.make_async_copy(scratch.out.at[:, rows(nth)], target, semaphore))

        lax.fori_loop(0, pieces, one, None)
        do(pltpu.make_async_copy(scratch.lse, self.lse.at[tile], semaphore))
