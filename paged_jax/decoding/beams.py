"""Beam search: the rows of a request are chosen jointly, and forked and released as table entries.

A request has W rows, its beams, each with the log probability of what it holds. A step scores every
continuation, ``beam + log p(token)``, and looks at the best of a request in order: one that ends
and ranks among the first W is finished, with ``sum / tokens ** length_penalty`` as its score; the
best W that do not end become the beams, each the child of the row it continues, so blocks up to
there are shared and the partial last one is copied when it is written (PagedAttention, section
4.4, Figure 9).

Which rows are a request's, the book says; they may lie anywhere, beside rows that sample. Cost:
O(B * V) for log-softmax and top-k of every row, then O(R * F * (F + ends)).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.decoding.sampling import SamplingParams
from paged_jax.scheduling.book import Book
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

    def samples(self) -> SamplingParams:
        """What the beams are to a scheduler: a request's samples, which need no randomness."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            temperature=0,
            ignore_eos=self.ignore_eos,
        )


class Searches(flax.struct.PyTreeNode):
    """How each of R requests is searched."""

    searches_R: jax.Array  # bool; the others sample
    penalty_R: jax.Array  # f32: length_penalty
    early_R: jax.Array  # bool: early_stopping


class Beams(flax.struct.PyTreeNode):
    """Searches of up to F beams: sample f of a request is its beam f.

    ``finished_*``: the best finished outputs of each request, best first: their score (-inf for
    none), the tokens before the one that ended them, the beam that they continued, that token.
    """

    how: Searches
    score_RF: jax.Array  # f32, sum of log probabilities; -inf for a beam that does not exist
    finished_score_RF: jax.Array
    finished_sum_RF: jax.Array
    finished_step_RF: jax.Array
    finished_beam_RF: jax.Array
    finished_token_RF: jax.Array
    open_R: jax.Array  # bool: the beams may still come before what is finished


class Chosen(NamedTuple):
    """What became of B rows in a step."""

    searches_B: jax.Array  # bool: the row is a beam, the rest is about such rows
    token_B: jax.Array  # i32
    score_B: jax.Array  # f32
    parent_B: jax.Array  # i32: the row that it continues; rows that are no beams their own
    ends_B: jax.Array  # bool: its request needs no further step


@functools.partial(jax.jit, static_argnames=("requests", "samples"))
def create(*, requests: int, samples: int) -> Beams:
    """No searches."""

    def full(value: float) -> jax.Array:
        return jnp.full((requests, samples), value)

    none, nobody = jnp.zeros((requests, samples), jnp.int32), jnp.zeros(requests, bool)
    return Beams(
        how=Searches(nobody, jnp.zeros(requests), nobody),
        score_RF=full(-jnp.inf),
        finished_score_RF=full(-jnp.inf),
        finished_sum_RF=full(0.0),
        finished_step_RF=none,
        finished_beam_RF=none,
        finished_token_RF=none,
        open_R=nobody,
    )


def begin(beams: Beams, new_R: jax.Array, how: Searches) -> Beams:
    """Searches of the marked requests begin, each with one beam that exists; the others go on."""
    requests, samples = beams.score_RF.shape
    first = create(requests=requests, samples=samples)
    first = first.replace(score_RF=first.score_RF.at[:, 0].set(0.0), how=how, open_R=new_R)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(new_R.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, first, beams)


def choose(
    beams: Beams, book: Book, logits_BV: jax.Array, end_BX: jax.Array, draws_B: jax.Array
) -> tuple[Beams, Chosen]:
    """One step of the searches whose rows draw, all rows of a request together.

    Args:
      beams, book: the searches, and whose rows are whose.
      logits_BV: f32, from which each row draws.
      end_BX: i32, tokens that end the row's sequence, -1 for none.
      draws_B: bool, rows that draw in this step.
    """
    sizes = dims(logits_BV=logits_BV, end_BX=end_BX, draws_B=draws_B, score_RF=beams.score_RF)
    row_B = jnp.arange(sizes.B, dtype=jnp.int32)
    searches_B = draws_B & jnp.append(beams.how.searches_R, False)[book.owner_B]
    owner_B = jnp.where(searches_B, book.owner_B, sizes.R)
    row_RF = jnp.full((sizes.R, sizes.F), sizes.B, jnp.int32)
    row_RF = row_RF.at[owner_B, book.sample_B].set(row_B, mode="drop")
    draws_R = (row_RF < sizes.B).any(axis=1)

    def of_row(value_RF: jax.Array, fill: float) -> jax.Array:
        return value_RF.at[owner_B, book.sample_B].get(mode="fill", fill_value=fill)

    # Of a row's best continuations at most X end, so F others stand among the first F + X.
    score_B = of_row(beams.score_RF, -jnp.inf)
    total_BV = score_B[:, None] + jax.nn.log_softmax(logits_BV, axis=-1)
    each = min(sizes.F + sizes.X, sizes.V)
    sum_BC, token_BC = lax.top_k(total_BV, each)
    ends_BC = (token_BC[:, :, None] == end_BX[:, None, :]).any(axis=-1)

    def of_request(value_BC: jax.Array, fill: float) -> jax.Array:
        value_RFC = value_BC.at[row_RF].get(mode="fill", fill_value=fill)
        return value_RFC.reshape(sizes.R, sizes.F * each)

    sum_RZ, token_RZ = of_request(sum_BC, -jnp.inf), of_request(token_BC, 0)
    ends_RZ = of_request(ends_BC, False)
    sums_RF, place_RF = lax.top_k(jnp.where(ends_RZ, -jnp.inf, sum_RZ), sizes.F)
    beam_F, width_R = jnp.arange(sizes.F), book.live_RF.sum(axis=1)
    real_RF = (sums_RF > -jnp.inf) & (beam_F < width_R[:, None])
    # A beam without a continuation holds what the best one does, and never comes to anything.
    place_RF = jnp.where(real_RF, place_RF, place_RF[:, :1])
    score_RF = jnp.where(real_RF, sums_RF, -jnp.inf)

    beams = _finish(beams, book, sum_RZ, token_RZ, ends_RZ, draws_R)
    done_R = draws_R & _done(beams, book, score_RF)
    beams = beams.replace(
        score_RF=jnp.where(draws_R[:, None], score_RF, beams.score_RF),
        open_R=beams.open_R & ~done_R,
    )
    parent_RF = jnp.take_along_axis(row_RF, place_RF // each, axis=1)
    return beams, Chosen(
        searches_B=searches_B,
        token_B=of_row(jnp.take_along_axis(token_RZ, place_RF, axis=1), 0),
        score_B=of_row(score_RF, 0.0),
        parent_B=jnp.where(searches_B, of_row(parent_RF, 0), row_B),
        ends_B=jnp.append(done_R, False)[owner_B],
    )


def _finish(
    beams: Beams,
    book: Book,
    sum_RZ: jax.Array,
    token_RZ: jax.Array,
    ends_RZ: jax.Array,
    draws_R: jax.Array,
) -> Beams:
    """Adds candidates that ended among the first W to the best finished outputs."""
    samples = beams.score_RF.shape[1]
    sum_RF, place_RF = lax.top_k(sum_RZ, samples)
    first_RF = jnp.arange(samples) < book.live_RF.sum(axis=1)[:, None]
    ended_RF = jnp.take_along_axis(ends_RZ, place_RF, axis=1) & (sum_RF > -jnp.inf)
    ended_RF &= first_RF & draws_R[:, None]
    before_R = book.drawn_RF[:, 0]
    length_R = (before_R + 1).astype(jnp.float32)
    score_RF = sum_RF / (length_R**beams.how.penalty_R)[:, None]
    # Earlier ones stand first, so that they win ties.
    best_RF, kept_RF = lax.top_k(
        jnp.concatenate([beams.finished_score_RF, jnp.where(ended_RF, score_RF, -jnp.inf)], axis=1),
        samples,
    )

    def join(old_RF: jax.Array, new_RF: jax.Array) -> jax.Array:
        return jnp.take_along_axis(jnp.concatenate([old_RF, new_RF], axis=1), kept_RF, axis=1)

    each = sum_RZ.shape[1] // samples
    return beams.replace(
        finished_score_RF=best_RF,
        finished_sum_RF=join(beams.finished_sum_RF, sum_RF),
        finished_step_RF=join(
            beams.finished_step_RF, jnp.broadcast_to(before_R[:, None], sum_RF.shape)
        ),
        finished_beam_RF=join(beams.finished_beam_RF, place_RF // each),
        finished_token_RF=join(
            beams.finished_token_RF, jnp.take_along_axis(token_RZ, place_RF, axis=1)
        ),
    )


def _done(beams: Beams, book: Book, score_RF: jax.Array) -> jax.Array:
    """Whether a request needs no further step, [R]."""
    last_R = jnp.maximum(book.live_RF.sum(axis=1) - 1, 0)
    worst_R = jnp.take_along_axis(beams.finished_score_RF, last_R[:, None], axis=1)[:, 0]
    # Sums only fall, and dividing by a longer length brings a negative one nearer to 0.
    penalty_R, next_R = beams.how.penalty_R, book.drawn_RF[:, 0] + 2
    longest_R = jnp.where(penalty_R > 0, book.output_RF[:, 0], next_R).astype(jnp.float32)
    attainable_R = score_RF.max(axis=1) / longest_R**penalty_R
    return (worst_R > -jnp.inf) & (beams.how.early_R | (worst_R >= attainable_R))
