"""What one program of the Hopper prefill kernel does: a producer and one or two consumers.

The producer warpgroup copies the program's queries once, and its keys and values step by step into
``stages`` buffers; a cache in another type than the queries' it rewrites on the way, so consumers
never see one. A consumer keeps the online softmax of 64 query rows in registers (Milakov and
Gimelshein, arXiv 1805.02867; warp-specialised as in FlashAttention-3, arXiv 2407.08608), logits in
base 2. Keys that no query of the tile sees are not copied, and only steps that hold a key some
query does not see are masked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import visibility
from pallas_kernels.mosaic_gpu import parts
from pallas_kernels.mosaic_gpu.prefill_plan import (
    ALIGN,
    ROWS,
    WORD,
    Buffers,
    Inputs,
    Plan,
    Work,
)

COLUMNS = parts.SWIZZLED_COLUMNS
TILE = plgpu.Layout.WGMMA
VECTOR = plgpu.Layout.WGMMA.reduce(1)  # one value a row of a TILE
Mask = Callable[[jax.Array, jax.Array], jax.Array]  # (step, logits) -> logits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, as one of its warpgroups sees it. Outputs are [I, programs, rows, ...]."""

    plan: Plan
    inputs: Inputs
    out: Any
    lse: Any
    buffers: Buffers
    tile: jax.Array
    index: jax.Array
    warpgroup: jax.Array
    work: Work  # the tile's, scalars

    def run(self) -> None:
        """The kernel's body."""
        busy = self.work.stop_I > 0
        pl.when(busy & (self.warpgroup == self.plan.consumers))(self.produce)
        pl.when(busy & (self.warpgroup < self.plan.consumers))(self.consume)

    @property
    def kv_head(self) -> jax.Array:
        return lax.div(self.index * self.plan.heads, jnp.int32(self.plan.problem.group))

    @property
    def rows(self) -> Any:
        """This consumer's rows of the program."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def stage(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.plan.stages))

    def key(self, step: jax.Array) -> jax.Array:
        """A step's first key."""
        return self.work.key_I + step * self.plan.step.tokens

    # The producer.

    def produce(self) -> None:
        """Copies everything the consumers need, as buffers come free."""
        self.copy_queries()
        if self.plan.converts:
            ahead = jnp.int32(self.plan.stages)
            lax.fori_loop(0, lax.min(ahead, self.work.stop_I), self.copy_stored, None)
            lax.fori_loop(0, self.work.stop_I, self.convert, None)
        else:
            lax.fori_loop(0, self.work.stop_I, self.copy, None)
        # Leave no arrival unseen: the interpreter of jax 0.11 asks for it.
        last = lax.max(self.work.stop_I - self.plan.stages, jnp.int32(0))
        lax.fori_loop(last, self.work.stop_I, self.drain, None)

    def copy_queries(self) -> None:
        """One copy a head, or two where a head fills both consumers."""
        plan, source = self.plan, self.inputs.query
        first = pl.multiple_of(self.work.token_I, ALIGN)
        tokens = min(plan.queries, ROWS)
        for row in range(0, plan.rows, tokens):
            head, token = divmod(row, plan.queries)
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(first + token, tokens), self.index * plan.heads + head],
                self.buffers.query.at[row // ROWS, pl.ds(row % ROWS, tokens)],
                self.buffers.query_full,
            )

    def copy(self, step: jax.Array, _: None = None) -> None:
        """Starts the copies of a step's keys and values to where they are used."""
        blocks, stage = self.blocks(step), self.stage(step)
        for side, target, full, free in self.sides():
            pl.when(step >= self.plan.stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
            self.copy_side(step, side, blocks, target, full)

    def copy_stored(self, step: jax.Array, _: None = None) -> None:
        """Starts the copies of a step's keys and values to where they are converted."""
        blocks, buffers = self.blocks(step), self.buffers
        self.copy_side(step, 0, blocks, buffers.stored_keys, buffers.stored_keys_full)
        self.copy_side(step, 1, blocks, buffers.stored_values, buffers.stored_values_full)

    def copy_side(
        self, step: jax.Array, side: int, blocks: list[jax.Array], target: Any, full: Any
    ) -> None:
        stage = self.stage(step)
        parts.copy_pieces(
            self.plan.problem,
            self.plan.step,
            self.inputs.cache,
            side,
            blocks,
            self.kv_head,
            self.key(step),
            target.at[stage],
            full.at[stage],
        )

    def convert(self, step: jax.Array, _: None = None) -> None:
        """Rewrites a step's keys and values in the queries' type, slot scales applied."""
        buffers, stage = self.buffers, self.stage(step)
        stored = (buffers.stored_keys, buffers.stored_values)
        stored_full = (buffers.stored_keys_full, buffers.stored_values_full)
        for side, target, full, free in self.sides():
            plgpu.barrier_wait(stored_full[side].at[stage])
            pl.when(step >= self.plan.stages)(functools.partial(plgpu.barrier_wait, free.at[stage]))
            self.convert_side(step, side, stored[side].at[stage], target.at[stage])
            plgpu.barrier_arrive(full.at[stage])
        ahead = step + self.plan.stages
        pl.when(ahead < self.work.stop_I)(functools.partial(self.copy_stored, ahead))

    def convert_side(self, step: jax.Array, side: int, source: Any, target: Any) -> None:
        problem = self.plan.problem
        slot_scales = (problem.k_scale, problem.v_scale)[side] == "slot"
        scales = (self.inputs.k_scale, self.inputs.v_scale)[side]

        def rescale(row: int, value: jax.Array) -> jax.Array:
            if not slot_scales:
                return value
            place = pl.ds(self.key(step) + row, ROWS)
            scale = parts.load(scales.at[self.work.row_I, self.kv_head, place])
            return (value.astype(jnp.float32) * spread(scale, value.shape)).astype(problem.dtype)

        parts.rewrite(source, target, rescale)

    def drain(self, step: jax.Array, _: None = None) -> None:
        plgpu.barrier_wait(self.buffers.keys_free.at[self.stage(step)])
        plgpu.barrier_wait(self.buffers.values_free.at[self.stage(step)])

    def sides(self) -> tuple[tuple[int, Any, Any, Any], ...]:
        """Keys and values: side of the cache, buffer, its full and its free barrier."""
        buffers = self.buffers
        return (
            (0, buffers.keys, buffers.keys_full, buffers.keys_free),
            (1, buffers.values, buffers.values_full, buffers.values_free),
        )

    def blocks(self, step: jax.Array) -> list[jax.Array]:
        """Where the pieces of a step lie."""
        return parts.piece_ids(
            self.plan.problem,
            self.plan.step,
            self.inputs.table,
            self.work.row_I,
            self.key(step),
            self.work.end_I,
        )

    # A consumer.

    def consume(self) -> None:
        """Attends 64 query rows, and writes their output and lse."""
        work, width = self.work, self.plan.problem.width
        plgpu.barrier_wait(self.buffers.query_full)
        carry = (
            plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), VECTOR),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), VECTOR),
            plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), TILE),
        )
        masked = functools.partial(self.attend, mask=self.mask)
        if self.plan.problem.window is not None:
            carry = lax.fori_loop(0, work.full_start_I, masked, carry)
        carry = lax.fori_loop(work.full_start_I, work.full_stop_I, self.attend, carry)
        if self.plan.problem.draft is not None:
            masked = functools.partial(self.attend, mask=self.mask_draft)
        carry = lax.fori_loop(work.full_stop_I, work.stop_I, masked, carry)
        self.finish(*carry)

    def attend(self, step: jax.Array, carry: Any, *, mask: Mask | None = None) -> Any:
        """One step of the online softmax: maximum (in base 2), sum and output of each row."""
        plan, buffers, stage = self.plan, self.buffers, self.stage(step)
        most, total, out = carry
        plgpu.barrier_wait(buffers.keys_full.at[stage])
        keys = buffers.keys.at[stage].transpose((1, 0))
        logit = parts.dot(buffers.query.at[self.warpgroup], keys, interpret=plan.interpret)
        plgpu.barrier_arrive(buffers.keys_free.at[stage])
        unit = parts.LOG2E
        if plan.linear:
            # The maximum is then taken of products, and an exponent is one multiply-add.
            unit *= plan.problem.scale
        else:
            logit = self.logits(step, logit)
        if mask is not None:
            logit = mask(step, logit)
        highest = lax.max(most, jnp.max(logit, axis=1) * unit)
        # A row that has seen nothing yet has no maximum to subtract.
        shift = highest if mask is None else jnp.where(highest == -jnp.inf, 0.0, highest)
        weight = jnp.exp2(logit * unit - spread(shift, logit.shape))
        fade = jnp.exp2(most - shift)
        total = total * fade + jnp.sum(weight, axis=1)
        out *= spread(fade, out.shape)
        plgpu.barrier_wait(buffers.values_full.at[stage])
        if mask is not None:
            self.clean(step)
        weight = weight.astype(plan.problem.dtype)
        out = parts.dot(weight, buffers.values.at[stage], out, interpret=plan.interpret)
        plgpu.barrier_arrive(buffers.values_free.at[stage])
        return highest, total, out

    def logits(self, step: jax.Array, product: jax.Array) -> jax.Array:
        """Logits of products, where that takes more than a factor known now."""
        problem = self.plan.problem
        factor = problem.scale
        if problem.k_scale == "head":
            factor *= self.inputs.k_scale[self.kv_head]
        product *= factor
        position, column, slope = self.work.position_I, self.key(step), None
        if problem.alibi:
            slope = parts.load(self.inputs.slope.at[self.index, self.rows], VECTOR)
            slope = spread(slope, product.shape)
            # Counted from the step's first key: what changes with the step is then one a row.
            position = spread(self.positions() - self.key(step), product.shape)
            column = plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=TILE)
        return visibility.logits(problem, product, position, column, slope)

    def mask(self, step: jax.Array, logit: jax.Array) -> jax.Array:
        """Logits, -inf where a row does not see the key."""
        problem, work, key = self.plan.problem, self.work, self.key(step)
        alike = not problem.causal and problem.window is None
        position = work.position_I if alike else self.positions()
        # Ranges of rows, and a select for each end: conjunctions of masks take thrice as long.
        begin, end = visibility.key_range(problem, work.end_I, position, position)
        column = plgpu.broadcasted_iota(jnp.int32, logit.shape, 1, layout=TILE)
        logit = jnp.where(column < spread(end - key, logit.shape), logit, -jnp.inf)
        if problem.window is not None:
            logit = jnp.where(column >= spread(begin - key, logit.shape), logit, -jnp.inf)
        return logit

    def mask_draft(self, step: jax.Array, logit: jax.Array) -> jax.Array:
        """``mask`` by the bits of the draft's words."""
        column = plgpu.broadcasted_iota(jnp.int32, logit.shape, 1, layout=TILE)
        words = self.plan.step.tokens // WORD
        first = (step - self.work.full_stop_I) * words
        word = jnp.zeros_like(column)
        for index in range(words):
            value = parts.load(self.inputs.draft.at[self.tile, first + index, self.rows], VECTOR)
            word = jnp.where(column // WORD == index, spread(value, column.shape), word)
        return jnp.where((word >> (column & (WORD - 1))) & 1 == 1, logit, -jnp.inf)

    def positions(self) -> jax.Array:
        """Position of each row in the cache, a vector."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=VECTOR)
        token = (self.warpgroup * ROWS + row) & (self.plan.queries - 1)
        return self.work.position_I + token

    def clean(self, step: jax.Array) -> None:
        """Zeroes a step's values that no query of the tile sees: weight 0 does not undo NaN.

        Consumers share the work, some columns each.
        """
        work, key = self.work, self.key(step)
        values = self.buffers.values.at[self.stage(step)]

        def keep_seen(row: int, value: jax.Array) -> jax.Array:
            place = key + row + plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=TILE)
            seen = (place >= work.begin_I) & (place < work.end_I)
            return jnp.where(seen, value, jnp.zeros_like(value))

        @pl.when((key < work.begin_I) | (key + self.plan.step.tokens > work.end_I))
        def _() -> None:
            for index in range(self.plan.problem.width // COLUMNS):
                part = values.at[:, pl.ds(index * COLUMNS, COLUMNS)]
                mine = self.warpgroup == index % self.plan.consumers
                pl.when(mine)(functools.partial(parts.rewrite, part, part, keep_seen))
            plgpu.barrier_arrive(self.buffers.cleaned)
            plgpu.barrier_wait(self.buffers.cleaned)

    def finish(self, most: jax.Array, total: jax.Array, out: jax.Array) -> None:
        """Normalises, and writes the output where the queries were and from there to its tile."""
        problem, buffers = self.plan.problem, self.buffers
        highest = most
        if problem.sinks:
            sink = parts.load(self.inputs.sink.at[self.index, self.rows], VECTOR)
            highest = lax.max(most, sink)
        shift = jnp.where(highest == -jnp.inf, 0.0, highest)
        share = jnp.ones_like(total)
        if problem.sinks:
            share = jnp.exp2(most - shift)
            total = total * share + jnp.exp2(sink - shift)
        if problem.v_scale == "head":
            share *= self.inputs.v_scale[self.kv_head]
        share /= jnp.where(total > 0, total, 1.0)
        out *= spread(share, out.shape)
        query, lse = buffers.query.at[self.warpgroup], buffers.lse.at[self.warpgroup]
        query[...] = out.astype(problem.dtype)
        lse[...] = shift * (1 / parts.LOG2E) + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(query, self.out.at[self.tile, self.index, self.rows])
        plgpu.copy_smem_to_gmem(lse, self.lse.at[self.tile, self.index, self.rows])
        plgpu.wait_smem_to_gmem(0)


def spread(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value a row in all columns; a scalar as it is."""
    return lax.broadcast_in_dim(value, shape, [0]) if value.ndim else value
