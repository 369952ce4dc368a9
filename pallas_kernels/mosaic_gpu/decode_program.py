"""What one program of the Hopper decode kernel does: a producer and a consumer warpgroup.

Roles are swapped (S^T = K q^T, O^T = V^T P^T): stored tokens fill the 64 rows that the matrix unit
insists on, and the few query heads of a group its columns, 8 at least. The consumer keeps the
online softmax of each column in registers (Milakov and Gimelshein, arXiv 1805.02867), in base 2;
its sum stays one a row and column, so that a step has one exchange between warps, the maximum. The
four warps of the producer share the copies, since a warp takes some 25 issue slots for one. With at
most 80 registers a thread three programs stand on an SM, which hides the start and end of each.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import visibility
from pallas_kernels.mosaic_gpu import parts
from pallas_kernels.mosaic_gpu.decode_plan import Buffers, Inputs, Plan, Range

WARPS = 4  # of a warpgroup
TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a TILE
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one value a column


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, as one of its warpgroups sees it. Outputs are [splits, B * tiles, ...]."""

    plan: Plan
    inputs: Inputs
    out: Any
    lse: Any
    buffers: Buffers
    split: jax.Array
    row: jax.Array
    tile: jax.Array
    tokens: Range

    def run(self, role: jax.Array) -> None:
        """The kernel's body."""
        pl.when(role == 0)(self.consume)
        pl.when(role == 1)(self.produce)

    @property
    def query(self) -> Any:
        """The program's queries in shared memory, until there is an output."""
        (query, _), _ = self.buffers.small
        return query

    @property
    def weight(self) -> Any:
        """A step's weights in shared memory, until there is an output."""
        (_, weight), _ = self.buffers.small
        return weight

    @property
    def place(self) -> jax.Array:
        """Of the program's queries and outputs."""
        return self.row * self.plan.tiles + self.tile

    @property
    def rows(self) -> Any:
        """The place of a row of queries or outputs, padded: TMA reads zeros and writes nothing.

        The start is not a constant because a slice past a constant size is refused.
        """
        return pl.ds(self.tile * 0, self.plan.columns)

    def stage(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.plan.stages))

    def token(self, step: jax.Array) -> jax.Array:
        """A step's first token."""
        return self.tokens.first + step * self.plan.step.tokens

    def produce(self) -> None:
        """Copies keys and values as buffers come free, each warp its share of the pieces."""

        def produce_share(warp: jax.Array) -> None:
            for share in range(min(WARPS, self.plan.step.pieces)):
                pieces = range(share, self.plan.step.pieces, WARPS)
                pl.when(warp == share)(functools.partial(self.copy_pieces, pieces))

        plgpu.warp_map(produce_share)

    def copy_pieces(self, pieces: range) -> None:
        """Copies these pieces of every step."""
        plan, buffers, inputs = self.plan, self.buffers, self.inputs
        problem, step = plan.problem, plan.step
        sides = ((buffers.keys, buffers.keys_full), (buffers.values, buffers.values_full))

        # The last rounds copy nothing: the interpreter of jax 0.11 wants every arrival seen.
        @pl.loop(0, self.tokens.steps + plan.stages)
        def _(index: jax.Array) -> None:
            stage, token = self.stage(index), self.token(index)
            # Before the wait, which hides the time that reading the table takes.
            blocks = parts.piece_ids(
                problem, step, inputs.table, self.row, token, self.tokens.end, pieces
            )
            pl.when(index >= plan.stages)(lambda: plgpu.barrier_wait(buffers.free.at[stage]))

            @pl.when(index < self.tokens.steps)
            def _() -> None:
                head = self.tile * step.heads
                for side, (target, full) in enumerate(sides):
                    place = (target.at[stage], full.at[stage])
                    parts.copy_pieces(
                        problem, step, inputs.cache, side, blocks, head, token, *place, pieces
                    )

    def consume(self) -> None:
        """Attends the program's tokens, and writes output and lse."""
        plan, buffers = self.plan, self.buffers
        plgpu.copy_gmem_to_smem(
            self.inputs.query.at[self.place, self.rows], self.query, buffers.query_full
        )
        plgpu.barrier_wait(buffers.query_full)
        factor: Any = plan.problem.scale
        slope = None
        if plan.problem.k_scale == "head":
            factor *= parts.load(self.inputs.k_scale.at[self.tile], COLUMN)
        if plan.problem.alibi:
            slope = parts.load(self.inputs.slope.at[self.tile], COLUMN)
        full = functools.partial(self.attend, factor=factor, slope=slope, masked=False)
        masked = functools.partial(self.attend, factor=factor, slope=slope, masked=True)

        shapes = ((plan.step.rows, plan.columns), (plan.problem.width, plan.columns))
        total, out = (plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE) for shape in shapes)
        most = plgpu.layout_cast(jnp.full((plan.columns,), -jnp.inf, jnp.float32), COLUMN)
        carry = (most, total, out)
        # Apart, because a mask and cleaned values double the instructions of a step.
        _, _, _, steps, full_start, full_stop = self.tokens
        if plan.step.padded:
            carry = lax.fori_loop(0, steps, masked, carry)
        else:
            if plan.problem.window is not None:
                carry = lax.fori_loop(0, full_start, masked, carry)
            carry = lax.fori_loop(full_start, full_stop, full, carry)
            carry = lax.fori_loop(full_stop, steps, masked, carry)
        self.finish(*carry)

    def attend(
        self,
        step: jax.Array,
        carry: Any,
        *,
        factor: Any,
        slope: jax.Array | None,
        masked: bool,
    ) -> Any:
        """One step of the online softmax: maximum (in base 2), sum and output of each column."""
        plan, problem, buffers = self.plan, self.plan.problem, self.buffers
        most, total, out = carry
        k_scale = self.slot_scale(self.inputs.k_scale, problem.k_scale, step)
        v_scale = self.slot_scale(self.inputs.v_scale, problem.v_scale, step)

        queries = self.query.transpose((1, 0))
        product = parts.dot(self.keys(step), queries, interpret=plan.interpret)
        shape = product.shape
        product *= factor if isinstance(factor, float) else spread(factor, shape, 1)
        if k_scale is not None:
            product *= spread(k_scale, shape, 0)
        logit = parts.LOG2E * self.logits(step, product, slope)
        if masked:
            logit = self.hide(step, logit, -jnp.inf)

        highest = lax.max(most, jnp.max(logit, axis=0))
        weight = jnp.exp2(logit - spread(highest, shape, 1))
        fade = jnp.exp2(most - highest)
        total = total * spread(fade, shape, 1) + weight
        out *= spread(fade, out.shape, 1)
        if v_scale is not None:
            weight *= spread(v_scale, shape, 0)
            if masked:
                weight = self.hide(step, weight, 0.0)  # the scale of a slot nobody sees may be NaN
        self.weight.transpose((1, 0))[...] = weight.astype(problem.dtype)
        plgpu.commit_smem()
        values = self.values(step, masked).transpose((1, 0))
        out = parts.dot(values, self.weight.transpose((1, 0)), out, interpret=plan.interpret)
        plgpu.barrier_arrive(buffers.free.at[self.stage(step)])
        return highest, total, out

    def logits(self, step: jax.Array, product: jax.Array, slope: jax.Array | None) -> jax.Array:
        """Logits of scaled products; -inf where a row holds another head's token."""
        problem, filling, shape = self.plan.problem, self.plan.step, product.shape
        row = iota(shape, 0)
        position = self.token(step) + filling.token_of(row)
        slope = None if slope is None else spread(slope, shape, 1)
        logit = visibility.logits(problem, product, self.tokens.end - 1, position, slope)
        if filling.heads == 1:
            return logit
        own = filling.head_of(row) == iota(shape, 1) // problem.group
        return jnp.where(own, logit, -jnp.inf)

    def slot_scale(self, scales: Any, kind: str | None, step: jax.Array) -> jax.Array | None:
        """Scales of a step's rows, where each slot has its own. Best called before a wait."""
        if kind != "slot":
            return None
        place = pl.ds(self.token(step), self.plan.step.rows)
        return parts.load(scales.at[self.row, self.tile, place], ROW)

    def keys(self, step: jax.Array) -> Any:
        """A step's keys, [rows, D]."""
        plgpu.barrier_wait(self.buffers.keys_full.at[self.stage(step)])
        keys = self.buffers.keys.at[self.stage(step)]
        if not self.plan.converts:
            return keys
        parts.rewrite(keys, self.buffers.converted, lambda row, value: value)
        return self.buffers.converted

    def values(self, step: jax.Array, masked: bool) -> Any:
        """A step's values, [rows, D]; 0 where nobody sees them, as a weight of 0 keeps NaN."""
        plgpu.barrier_wait(self.buffers.values_full.at[self.stage(step)])
        values = self.buffers.values.at[self.stage(step)]

        def seen(row: int, value: jax.Array) -> jax.Array:
            return self.hide(step, value, 0, row) if masked else value

        if not self.plan.converts and not masked:
            return values
        target = self.buffers.converted if self.plan.converts else values
        parts.rewrite(values, target, seen)
        return target

    def hide(self, step: jax.Array, value: jax.Array, hidden: float, above: int = 0) -> jax.Array:
        """``hidden`` in rows whose token nobody sees, or that hold none; ``above`` are left out."""
        row = above + iota(value.shape, 0)
        token = self.token(step) + self.plan.step.token_of(row)
        # A select for each condition: the compiler does worse with their conjunction.
        conditions = [token < self.tokens.end]
        if self.plan.problem.window is not None:
            conditions.append(token >= self.tokens.begin)
        if self.plan.step.padded:
            conditions.append(row < self.plan.step.filled)
        for condition in conditions:
            value = jnp.where(condition, value, jnp.full_like(value, hidden))
        return value

    def finish(self, most: jax.Array, total: jax.Array, out: jax.Array) -> None:
        """Normalises, and writes output and lse; of a program without tokens 0 and -inf."""
        problem = self.plan.problem
        _, (out_smem, lse_smem) = self.buffers.small
        total = jnp.sum(total, axis=0)
        empty = total == 0
        total = jnp.where(empty, 1.0, total)
        share = 1 / total
        if problem.v_scale == "head":
            share *= parts.load(self.inputs.v_scale.at[self.tile], COLUMN)
        out *= spread(share, out.shape, 1)
        # In this layout pairs of a thread's values are neighbours in a row of the output.
        out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        out_smem.transpose((1, 0))[...] = out.astype(out_smem.dtype)
        lse_smem[...] = jnp.where(empty, -jnp.inf, jnp.log(total) + most * (1 / parts.LOG2E))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, self.out.at[self.split, self.place, self.rows])
        plgpu.copy_smem_to_gmem(lse_smem, self.lse.at[self.split, self.place])
        plgpu.wait_smem_to_gmem(0)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def spread(value: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A vector along ``axis`` of a tile."""
    return lax.broadcast_in_dim(value, shape, (axis,))
