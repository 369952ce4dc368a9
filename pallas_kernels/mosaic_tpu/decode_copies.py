"""What a decode launch reads and keeps, and the copies that run ahead of it.

A core's copies follow the same walk as its work, tile by tile through its rows, ``stages - 1``
tiles earlier: a cursor in SMEM, which outlasts a row, is all that they keep. Every tile copied is
attended later, so that no copy is left to wait for at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import visibility
from pallas_kernels.mosaic_tpu import parts
from pallas_kernels.problem import Problem


class Inputs(NamedTuple):
    """Arrays of a launch; R = K * padded group. None where an option is not used."""

    q: Any  # VMEM, [1, R, D]: the row's
    slope: Any  # VMEM, [R, 1]
    sink: Any  # VMEM, [R, 1]
    k_factor: Any  # VMEM, [R, 1]
    v_factor: Any  # VMEM, [R, 1]
    kv: Any  # HBM, [N, 2, K, S, D]
    k_scale: Any  # HBM, [N, K, S]
    v_scale: Any  # HBM, [N, K, S]


class Scratch(NamedTuple):
    """What lasts from row to row."""

    kv: Any  # VMEM, [stages, blocks of a tile, 2, K, S, D]
    k_scale: Any  # VMEM, [stages, blocks of a tile, K, S]
    v_scale: Any  # VMEM, [stages, blocks of a tile, K, S]
    semaphore: Any  # [stages]
    cursor: Any  # SMEM, [4]: see Ahead


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """Copies ``stages - 1`` tiles ahead of the one attended, by way of rows that hold tokens.

    The cursor holds the stage of the tile attended next, then the row, the next logical block and
    the end block of the copies.
    """

    problem: Problem
    cores: int
    length: Any  # SMEM, [B]
    fetch: parts.Fetch
    cursor: Any

    def blocks(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First block that a row's query sees, and one past the last."""
        position = self.length[row] - 1
        begin, end = visibility.key_range(self.problem, self.length[row], position, position)
        size = self.problem.block_size
        return parts.quotient(begin, size), parts.ceil_quotient(end, size)

    def begin(self, core: jax.Array) -> None:
        """Start the first copies of a core."""
        self.cursor[0] = 0
        self._seek(core)
        lax.fori_loop(jnp.int32(0), self._stages - 1, lambda stage, _: self._start(stage), None)

    def next(self) -> jax.Array:
        """The next tile's stage. The one before it has been attended: its stage is filled anew."""
        stage = self.cursor[0]
        self.cursor[0] = jnp.where(stage == self._stages - 1, 0, stage + 1)
        self._start(jnp.where(stage == 0, self._stages - 1, stage - 1))
        return stage

    @property
    def _stages(self) -> int:
        return self.fetch.semaphore.shape[0]

    def _start(self, stage: jax.Array) -> None:
        row, block, end = self.cursor[1], self.cursor[2], self.cursor[3]
        # After the last row nothing is left to copy: block is end, and stays at or past it.
        self.fetch.start(stage, row, block, jnp.minimum(end - block, self.fetch.blocks))
        self.cursor[2] = block + self.fetch.blocks
        ends = (block + self.fetch.blocks >= end) & (row < self.length.shape[0])
        pl.when(ends)(lambda: self._seek(row + self.cores))

    def _seek(self, row: jax.Array) -> None:
        """Go to this core's first row from ``row`` on that holds tokens."""
        rows = self.length.shape[0]

        def holds_nothing(row: jax.Array) -> jax.Array:
            return (row < rows) & (self.length[jnp.minimum(row, rows - 1)] == 0)

        row = lax.while_loop(holds_nothing, lambda row: row + self.cores, row)
        first, last = self.blocks(jnp.minimum(row, rows - 1))
        self.cursor[1] = row
        self.cursor[2] = first
        self.cursor[3] = jnp.where(row < rows, last, first)
