"""Online softmax of a prefill tile, all in VMEM: begin, a step for each stage of keys, end.

Logits are in base 2, where an exponential is one instruction. A row's statistics are spread over
the lanes of a register, the greatest logit repeated and the sum of weights in parts: neither moves
data between lanes in a step, but for the one maximum.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import visibility
from pallas_kernels.mosaic_tpu import packing, parts
from pallas_kernels.mosaic_tpu.prefill_copies import Inputs, Scratch
from pallas_kernels.problem import Problem

LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A tile's queries against the tokens of one stage."""

    problem: Problem
    work: packing.Work
    inputs: Inputs
    scratch: Scratch
    tile: jax.Array
    step: jax.Array
    side: jax.Array  # of the queries
    stage: jax.Array  # of the keys and values

    def attend(self) -> None:
        """Adds the stage to the statistics of all heads."""
        whole = self._seen_whole()
        pl.when(whole)(lambda: self._attend_heads(masked=False))
        pl.when(~whole)(lambda: self._attend_heads(masked=True))

    def _attend_heads(self, masked: bool) -> None:
        # One head's softmax runs beside the other's products. Masked steps are few: less code.
        together = 1 if masked or self.problem.kv_heads % 2 else 2

        def some(nth: jax.Array, _: None) -> None:
            heads = [nth * together + i for i in range(together)]
            logits = [self._logits(head, masked) for head in heads]
            weights = [self._weights(*each, masked) for each in zip(heads, logits, strict=True)]
            for head, (weight, fade) in zip(heads, weights, strict=True):
                v = parts.head(self.scratch.kv, self.stage, 1, head, self.problem)
                value = parts.dot(weight.astype(v.dtype), v, (1, 0))
                fade = _lanes(fade, self.problem.width)
                self.scratch.sum[head] = self.scratch.sum[head] * fade + value

        lax.fori_loop(jnp.int32(0), self.problem.kv_heads // together, some, None)

    def _seen_whole(self) -> jax.Array:
        """Whether every query of the tile sees every token of the step."""
        problem, work, tile = self.problem, self.work, self.tile
        tokens = parts.tokens(self.scratch.kv)
        begin, first = self.step * tokens, work.position_I[tile]
        end = begin + tokens
        whole = (work.begin_I[tile] <= begin) & (end <= work.end_I[tile])
        if problem.causal:
            whole &= end <= first + 1
        if problem.window is not None:
            whole &= begin > first + work.count_I[tile] - 1 - problem.window
        if problem.draft is not None:
            whole &= end <= work.own_I[tile]
        return whole

    def _logits(self, head: jax.Array, masked: bool) -> jax.Array:
        """Logits in base 2, [R, tokens]; -inf where not visible."""
        problem, work, tile = self.problem, self.work, self.tile
        k = parts.head(self.scratch.kv, self.stage, 0, head, problem)
        q = self.scratch.q[self.side, head].astype(k.dtype)
        product = parts.dot(q, k, (1, 1)) * self.inputs.k_factor[head]
        if self.scratch.k_scale is not None:
            product *= self.scratch.k_scale[self.stage, head]
        row = lax.broadcasted_iota(jnp.int32, (product.shape[0], 1), 0)
        query = work.position_I[tile] + lax.div(row, jnp.int32(problem.group))
        slope = None
        if self.inputs.slope is not None:
            slope = _lanes(self.inputs.slope[head], product.shape[1])
        cap = None if problem.soft_cap is None else problem.soft_cap * LOG2E
        in_base_2 = dataclasses.replace(problem, soft_cap=cap)
        logit = visibility.logits(in_base_2, product, query, self._keys(), slope)
        if not masked:
            return logit
        seen = visibility.visible(problem, query, self._keys(), work.length_I[tile])
        if self.scratch.draft is not None:
            nth = self.step - parts.quotient(jnp.maximum(work.own_I[tile], 0), product.shape[1])
            allowed = self.scratch.draft[self.side, jnp.maximum(nth, 0)].astype(jnp.int32)
            seen &= (allowed > 0) | (nth < 0)
        return jnp.where(seen, logit, -jnp.inf)

    def _weights(
        self, head: jax.Array, logit: jax.Array, masked: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Weights of the values, and what earlier sums are to be multiplied with."""
        scratch, tokens = self.scratch, logit.shape[1]
        before = scratch.most[head]
        most = jnp.maximum(before, jnp.max(logit, axis=1, keepdims=True))
        # Where all is masked so far, -inf - -inf would be NaN.
        shift = jnp.where(most > -jnp.inf, most, 0.0) if masked else most
        weight = jnp.exp2(logit - _lanes(shift, tokens))
        fade = jnp.exp2(before - shift)
        total = scratch.total[head] * fade
        for lane in range(0, tokens, parts.LANES):
            total += weight[:, lane : lane + parts.LANES]
        scratch.most[head] = most
        scratch.total[head] = total
        if scratch.v_scale is not None:
            scale = scratch.v_scale[self.stage, head]
            weight *= jnp.where(self._in_range(), scale, 0.0) if masked else scale
        return weight, fade

    def _keys(self) -> jax.Array:
        """Positions of the step's tokens, [1, tokens]."""
        tokens = parts.tokens(self.scratch.kv)
        return self.step * tokens + lax.broadcasted_iota(jnp.int32, (1, tokens), 1)

    def _in_range(self) -> jax.Array:
        """Whether anybody sees a token: what nobody does may hold NaN, and 0 * NaN is NaN."""
        key = self._keys()
        return (key >= self.work.begin_I[self.tile]) & (key < self.work.end_I[self.tile])


def begin(inputs: Inputs, scratch: Scratch) -> None:
    """Statistics before the first key: a sink is a key that has been seen, with value 0."""
    scratch.sum[...] = jnp.zeros_like(scratch.sum)
    if inputs.sink is None:
        scratch.most[...] = jnp.full_like(scratch.most, -jnp.inf)
        scratch.total[...] = jnp.zeros_like(scratch.total)
    else:
        sink = inputs.sink[...]
        lane = lax.broadcasted_iota(jnp.int32, sink.shape, 2)
        scratch.most[...] = sink
        scratch.total[...] = jnp.where((lane == 0) & (sink > -jnp.inf), 1.0, 0.0)


def end(inputs: Inputs, scratch: Scratch) -> None:
    """Normalises a tile's sums into its results."""

    def one(head: jax.Array, _: None) -> None:
        total = jnp.sum(scratch.total[head], axis=1, keepdims=True)
        out = scratch.sum[head] * (inputs.v_factor[head] / jnp.where(total > 0, total, 1.0))
        scratch.out[head] = out.astype(scratch.out.dtype)
        # Rows along lanes: a logarithm then fills its register.
        most, total = scratch.most[head].T[:1], jnp.sum(scratch.total[head].T, axis=0)[None]
        scratch.lse[head] = most * (1 / LOG2E) + jnp.log(total)

    lax.fori_loop(jnp.int32(0), scratch.q.shape[1], one, None)


def _lanes(array: jax.Array, width: int) -> jax.Array:
    """An array whose lanes are all the same, as wide as asked."""
    return jnp.concatenate([array] * -(-width // parts.LANES), axis=1)[:, :width]
