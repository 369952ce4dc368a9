"""Beam search as forks and releases of block tables, many steps in one dispatch.

A request has W rows, its beams, each with the log probability of what it holds. A step scores every
continuation, ``beam + log p(token)``, and looks at the best of a request in order: one that ends
and ranks among the first W is finished, with ``sum / tokens ** length_penalty`` as its score; the
best W that do not end become the beams, each the child of the row it continues, so blocks up to
there are shared and the partial last one is copied when it is written (PagedAttention, section
4.4, Figure 9). What happened is kept as (parent, token) a step and read back from the end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.decoding import steps
from paged_jax.decoding.steps import Batch
from pallas_kernels import dims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How beams are kept and compared. Raises ``ValueError`` for values that do not go."""

    beam_width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0  # above 0 prefers long outputs
    early_stopping: bool = False  # True: done with beam_width finished, else when none can improve
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty: expected a number, got {self.length_penalty}")


class Beams(flax.struct.PyTreeNode):
    """R requests of W beams; row r * W + w is beam w of request r.

    ``finished_*``: the best W finished outputs of each request, best first: their score (-inf for
    none), the step that ended them, and the row that they continued then.
    """

    batch: Batch
    score_B: jax.Array  # f32, sum of log probabilities; -inf for a beam that does not exist
    finished_score_RF: jax.Array
    finished_sum_RF: jax.Array
    finished_step_RF: jax.Array
    finished_row_RF: jax.Array
    finished_token_RF: jax.Array
    open_R: jax.Array  # bool: the beams may still come before what is finished
    token_XB: jax.Array  # i32: what became row b in each step
    parent_XB: jax.Array  # i32: the row it continued, B where its request was done
    steps: jax.Array  # i32
    fits: jax.Array  # bool


def create(batch: Batch, params: BeamSearchParams) -> Beams:
    """Beams of a batch whose prompts are not stored yet; one beam a request has a score."""
    rows, width, max_tokens = batch.token_B.shape[0], params.beam_width, params.max_tokens
    shape = (rows // width, width)

    def none() -> jax.Array:  # an array each: they are donated
        return jnp.zeros(shape, jnp.int32)

    return Beams(
        batch=batch,
        score_B=jnp.where(jnp.arange(rows) % width == 0, 0.0, -jnp.inf),
        finished_score_RF=jnp.full(shape, -jnp.inf),
        finished_sum_RF=jnp.zeros(shape),
        finished_step_RF=none(),
        finished_row_RF=none(),
        finished_token_RF=none(),
        open_R=jnp.ones(shape[0], bool),
        token_XB=jnp.zeros((max_tokens, rows), jnp.int32),
        parent_XB=jnp.zeros((max_tokens, rows), jnp.int32),
        steps=jnp.int32(0),
        fits=jnp.bool_(True),
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "params", "last"), donate_argnames="beams")
def begin(
    graphdef: Any,
    weights: Any,
    beams: Beams,
    token_T: jax.Array,
    start_P: jax.Array,
    source_B: jax.Array,
    *,
    params: BeamSearchParams,
    last: bool,
) -> Beams:
    """Stores a chunk of the prompts, cut at ``start_P``; all requests begin with the ``last``."""
    batch, logits_BV, draws_B, fits = steps.store_prompts(
        graphdef, weights, beams.batch, token_T, start_P, source_B
    )
    beams = beams.replace(batch=batch, fits=beams.fits & fits)
    if not last:
        return beams
    return _choose(beams.replace(batch=batch.replace(live_B=draws_B)), logits_BV, params)


@functools.partial(jax.jit, static_argnames=("graphdef", "params"), donate_argnames="beams")
def search(
    graphdef: Any, weights: Any, beams: Beams, limit: jax.Array, *, params: BeamSearchParams
) -> Beams:
    """Goes on until ``limit`` steps are done, or all requests. ``fits``: memory was never short."""

    def goes_on(beams: Beams) -> jax.Array:
        return beams.fits & beams.batch.live_B.any() & (beams.steps < limit)

    def step(beams: Beams) -> Beams:
        batch, logits_BV, fits = steps.forward(graphdef, weights, beams.batch)
        return _choose(beams.replace(batch=batch, fits=fits), logits_BV, params)

    return lax.while_loop(goes_on, step, beams)


def _choose(beams: Beams, logits_BV: jax.Array, params: BeamSearchParams) -> Beams:
    """One step of the search from each beam's logits."""
    batch, width = beams.batch, params.beam_width
    sizes = dims(logits_BV=logits_BV, score_B=beams.score_B)
    requests, vocabulary = sizes.B // width, sizes.V
    live_R = batch.live_B.reshape(requests, width).any(axis=1)
    total_BV = beams.score_B[:, None] + jax.nn.log_softmax(logits_BV, axis=-1)
    # A beam has at most ``ends`` continuations that end, so W others stand among the first:
    ends = batch.end_BX.shape[1]
    sum_RC, flat_RC = lax.top_k(
        total_BV.reshape(requests, width * vocabulary), min(width * (1 + ends), width * vocabulary)
    )
    row_RC = (flat_RC // vocabulary + jnp.arange(requests)[:, None] * width).astype(jnp.int32)
    token_RC = (flat_RC % vocabulary).astype(jnp.int32)
    ends_RC = (token_RC[:, :, None] == batch.end_BX[row_RC]).any(axis=-1)
    real_RC = sum_RC > -jnp.inf

    beams = _finish(beams, sum_RC, row_RC, token_RC, ends_RC & real_RC, live_R, params)

    # The first W candidates that go on, in order.
    goes_RC = ~ends_RC & real_RC
    rank_RC = jnp.where(goes_RC, jnp.cumsum(goes_RC, axis=1) - 1, width)
    place_RF = jnp.argmax(rank_RC[:, None, :] == jnp.arange(width)[:, None], axis=-1)
    found_RF = (rank_RC[:, None, :] == jnp.arange(width)[:, None]).any(axis=-1)

    def pick(value_RC: jax.Array) -> jax.Array:
        return jnp.take_along_axis(value_RC, place_RF, axis=1)

    score_RF = jnp.where(found_RF, pick(sum_RC), -jnp.inf)
    steps_done = beams.steps + 1
    open_R = live_R & ~_done(beams, score_RF, steps_done, params)
    live_B = jnp.repeat(open_R, width) & (steps_done < params.max_tokens)
    rows = jnp.arange(sizes.B, dtype=jnp.int32)
    was_live_B = batch.live_B
    parent_B = jnp.where(was_live_B, pick(row_RC).reshape(-1), rows)
    token_B = jnp.where(was_live_B, pick(token_RC).reshape(-1), batch.token_B)
    score_B = jnp.where(was_live_B, score_RF.reshape(-1), beams.score_B)
    return beams.replace(
        batch=batch.replace(
            cache=batch.cache.reorder(parent_B),
            token_B=token_B,
            live_B=live_B,
        ),
        score_B=score_B,
        open_R=open_R,
        token_XB=beams.token_XB.at[beams.steps].set(token_B),
        parent_XB=beams.parent_XB.at[beams.steps].set(jnp.where(was_live_B, parent_B, sizes.B)),
        steps=steps_done,
    )


def _finish(
    beams: Beams,
    sum_RC: jax.Array,
    row_RC: jax.Array,
    token_RC: jax.Array,
    ended_RC: jax.Array,
    live_R: jax.Array,
    params: BeamSearchParams,
) -> Beams:
    """Adds candidates that ended among the first W to the best W finished outputs."""
    width = params.beam_width
    length = (beams.steps + 1).astype(jnp.float32)
    ranks_RC = jnp.arange(sum_RC.shape[1]) < width
    ended_RC &= ranks_RC & live_R[:, None]
    score_RC = jnp.where(ended_RC, sum_RC / length**params.length_penalty, -jnp.inf)
    step_RC = jnp.broadcast_to(beams.steps, score_RC.shape)
    # Earlier ones stand first, so that they win ties.
    best_RF, place_RF = lax.top_k(
        jnp.concatenate([beams.finished_score_RF, score_RC], axis=1), width
    )

    def join(old_RF: jax.Array, new_RC: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.concatenate([old_RF, new_RC], axis=1), place_RF, axis=1)

    return beams.replace(
        finished_score_RF=best_RF,
        finished_sum_RF=join(beams.finished_sum_RF, sum_RC),
        finished_step_RF=join(beams.finished_step_RF, step_RC),
        finished_row_RF=join(beams.finished_row_RF, row_RC),
        finished_token_RF=join(beams.finished_token_RF, token_RC),
    )


def _done(
    beams: Beams, score_RF: jax.Array, length: jax.Array, params: BeamSearchParams
) -> jax.Array:
    """Whether a request needs no further step."""
    full_R = (beams.finished_score_RF > -jnp.inf).all(axis=1)
    if params.early_stopping:
        return full_R
    # Sums only fall, and dividing by a longer length brings a negative one nearer to 0.
    longest = params.max_tokens if params.length_penalty > 0 else length + 1
    attainable_R = score_RF.max(axis=1) / jnp.float32(longest) ** params.length_penalty
    return full_R & (beams.finished_score_RF.min(axis=1) >= attainable_R)
