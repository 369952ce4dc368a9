"""The jitted steps of generation: prefill a chunk, decode many tokens in one dispatch.

Weights, batch and plan are arguments, the batch is donated; nothing inside talks to the host. A row
stores a token the step after it was drawn, so a row that has drawn n tokens of a prompt of p holds
p + n - 1. One program serves all batches of the same sizes.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.decoding import sampling
from paged_jax.decoding.caches import Cache
from paged_jax.decoding.sampling import Samplers, Uses
from pallas_kernels import dims


class Batch(flax.struct.PyTreeNode):
    """B rows between two steps. Empty rows are not live and hold nothing."""

    cache: Cache
    token_B: jax.Array  # i32, drawn last, not stored yet
    drawn_B: jax.Array  # i32, tokens drawn
    most_B: jax.Array  # i32, tokens to draw at most
    live_B: jax.Array  # bool, draws in the next decode step
    end_BX: jax.Array  # i32, tokens that end the row, -1 for none
    samplers: Samplers
    seen_BV: jax.Array | None = None  # bool, where a row penalises repetition


class Drawn(flax.struct.PyTreeNode):
    """Tokens of a dispatch: [steps, rows], -1 where a row drew none."""

    token_XB: jax.Array  # i32
    logprob_XB: jax.Array  # f32
    steps: jax.Array  # i32: steps done
    fits: jax.Array  # bool: False when the next step lacked memory, nothing of it was done


def create(cache: Cache, *, rows: int, ends: int) -> Batch:
    """Empty rows over a cache, each with room for ``ends`` tokens that end it."""
    return Batch(
        cache=cache,
        token_B=jnp.zeros(rows, jnp.int32),
        drawn_B=jnp.zeros(rows, jnp.int32),
        most_B=jnp.zeros(rows, jnp.int32),
        live_B=jnp.zeros(rows, bool),
        end_BX=jnp.full((rows, ends), -1, jnp.int32),
        samplers=sampling.samplers([], rows),
    )


@functools.partial(jax.jit, donate_argnames="batch")
def seat(
    batch: Batch,
    seated_B: jax.Array,
    most_B: jax.Array,
    end_BX: jax.Array,
    samplers: Samplers,
    seen_BV: jax.Array | None,
) -> Batch:
    """Gives the marked rows, which are empty, to new sequences; the others go on."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(seated_B.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    if seen_BV is not None and batch.seen_BV is not None:
        seen_BV = choose(seen_BV, batch.seen_BV)
    return batch.replace(
        drawn_B=choose(jnp.zeros_like(batch.drawn_B), batch.drawn_B),
        most_B=choose(most_B, batch.most_B),
        end_BX=choose(end_BX, batch.end_BX),
        samplers=jax.tree.map(choose, samplers, batch.samplers),
        seen_BV=seen_BV,
    )


@functools.partial(jax.jit, donate_argnames="batch")
def retire(batch: Batch, rows_B: jax.Array) -> Batch:
    """Empties the marked rows."""
    return batch.replace(cache=batch.cache.release(rows_B), live_B=batch.live_B & ~rows_B)


@functools.partial(jax.jit, static_argnames=("graphdef", "uses"), donate_argnames="batch")
def prefill(
    graphdef: Any,
    weights: Any,
    batch: Batch,
    token_T: jax.Array,
    start_P: jax.Array,
    source_B: jax.Array,
    *,
    uses: Uses,
) -> tuple[Batch, Drawn]:
    """Stores packed prompt tokens; rows that end their prompt draw their first token.

    ``start_P`` cuts ``token_T`` into rows. ``source_B`` is, for every row that draws now, the row
    whose last hidden state it draws from: itself, or the sibling whose prompt it forks. B: none.
    """
    batch, logits_BV, draws_B, fits = store_prompts(
        graphdef, weights, batch, token_T, start_P, source_B
    )
    return _draw(batch, logits_BV, draws_B, uses, fits)


def store_prompts(
    graphdef: Any,
    weights: Any,
    batch: Batch,
    token_T: jax.Array,
    start_P: jax.Array,
    source_B: jax.Array,
) -> tuple[Batch, jax.Array, jax.Array, jax.Array]:
    """``prefill`` before anything is drawn: ``(batch', logits_BV, draws_B, fits)``."""
    sizes = dims(source_B=source_B, token_B=batch.token_B, token_T=token_T)
    cache, fits = batch.cache.grow(jnp.diff(start_P))
    stores_B = (jnp.diff(start_P) > 0) & fits
    view, position_T = cache.view(stores_B, start_P, sizes.T)
    model = nnx.merge(graphdef, weights)
    hidden_TE, view = model(token_T, position_T, view)
    cache = cache.keep(view)

    draws_B = (source_B < sizes.B) & fits
    source_B = jnp.minimum(source_B, sizes.B - 1)
    further_B = draws_B & (source_B != jnp.arange(sizes.B))
    cache = cache.fork(jnp.where(further_B, source_B, sizes.B))
    last_B = jnp.clip(start_P[source_B + 1] - 1, 0, sizes.T - 1)
    return batch.replace(cache=cache), model.logits(hidden_TE[last_B]), draws_B, fits


@functools.partial(
    jax.jit, static_argnames=("graphdef", "uses", "most_steps"), donate_argnames="batch"
)
def decode(
    graphdef: Any,
    weights: Any,
    batch: Batch,
    steps: jax.Array,
    *,
    most_steps: int,
    uses: Uses,
) -> tuple[Batch, Drawn]:
    """Up to ``steps`` decode steps, fewer when all rows have ended or memory is short."""
    sizes = dims(token_B=batch.token_B)
    drawn = Drawn(
        token_XB=jnp.full((most_steps, sizes.B), -1, jnp.int32),
        logprob_XB=jnp.zeros((most_steps, sizes.B)),
        steps=jnp.int32(0),
        fits=jnp.bool_(True),
    )

    def goes_on(carry: tuple[Batch, Drawn]) -> jax.Array:
        batch, drawn = carry
        return (drawn.steps < steps) & drawn.fits & batch.live_B.any()

    def step(carry: tuple[Batch, Drawn]) -> tuple[Batch, Drawn]:
        batch, drawn = carry
        batch, new = decode_step(graphdef, weights, batch, uses)
        return batch, Drawn(
            token_XB=drawn.token_XB.at[drawn.steps].set(new.token_XB[0]),
            logprob_XB=drawn.logprob_XB.at[drawn.steps].set(new.logprob_XB[0]),
            steps=drawn.steps + new.steps,
            fits=new.fits,
        )

    return lax.while_loop(goes_on, step, (batch, drawn))


def decode_step(graphdef: Any, weights: Any, batch: Batch, uses: Uses) -> tuple[Batch, Drawn]:
    """One token more for every live row, or none where memory is short."""
    batch, logits_BV, fits = forward(graphdef, weights, batch)
    return _draw(batch, logits_BV, batch.live_B & fits, uses, fits)


def forward(graphdef: Any, weights: Any, batch: Batch) -> tuple[Batch, jax.Array, jax.Array]:
    """Stores every live row's last token. Returns the batch, logits [B, V] and whether it fits."""
    cache, fits = batch.cache.grow(batch.live_B.astype(jnp.int32), most_tokens=1)
    # Where it does not fit no row is live for this step, and nothing is stored.
    view, position_B = cache.view(batch.live_B & fits, None, batch.live_B.shape[0])
    model = nnx.merge(graphdef, weights)
    hidden_BE, view = model(batch.token_B, position_B, view)
    return batch.replace(cache=cache.keep(view)), model.logits(hidden_BE), fits


def _draw(
    batch: Batch, logits_BV: jax.Array, draws_B: jax.Array, uses: Uses, fits: jax.Array
) -> tuple[Batch, Drawn]:
    """The batch after the marked rows have drawn from their logits, and what they drew."""
    token_B, logprob_B = sampling.sample(
        logits_BV, batch.samplers, batch.drawn_B, uses, batch.seen_BV
    )
    drawn_B = batch.drawn_B + draws_B
    ended_B = (token_B[:, None] == batch.end_BX).any(axis=1) | (drawn_B >= batch.most_B)
    seen_BV = batch.seen_BV
    if seen_BV is not None:
        target_B = jnp.where(draws_B, token_B, seen_BV.shape[1])
        seen_BV = seen_BV.at[jnp.arange(len(target_B)), target_B].set(True, mode="drop")
    batch = batch.replace(
        token_B=jnp.where(draws_B, token_B, batch.token_B),
        drawn_B=drawn_B,
        live_B=jnp.where(draws_B, ~ended_B, batch.live_B),
        seen_BV=seen_BV,
    )
    drawn = Drawn(
        token_XB=jnp.where(draws_B, token_B, -1)[None],
        logprob_XB=jnp.where(draws_B, logprob_B, 0.0)[None],
        steps=fits.astype(jnp.int32),
        fits=fits,
    )
    return batch, drawn
