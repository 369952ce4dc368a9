"""The forward passes of beam search: store chunks of prompts, store every row's last token.

Written to be traced into a larger program; nothing inside talks to the host. A row stores a token
the step after it was chosen.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.decoding.caches import Cache
from pallas_kernels import dims


class Batch(flax.struct.PyTreeNode):
    """B rows between two steps. Empty rows are not live and hold nothing."""

    cache: Cache
    token_B: jax.Array  # i32, chosen last, not stored yet
    live_B: jax.Array  # bool, goes on in the next step
    end_BX: jax.Array  # i32, tokens that end the row, -1 for none


def create(cache: Cache, *, rows: int, ends: int) -> Batch:
    """Empty rows over a cache, each with room for ``ends`` tokens that end it."""
    return Batch(
        cache=cache,
        token_B=jnp.zeros(rows, jnp.int32),
        live_B=jnp.zeros(rows, bool),
        end_BX=jnp.full((rows, ends), -1, jnp.int32),
    )


@functools.partial(jax.jit, donate_argnames="batch")
def retire(batch: Batch, rows_B: jax.Array) -> Batch:
    """Empties the marked rows."""
    return batch.replace(cache=batch.cache.release(rows_B), live_B=batch.live_B & ~rows_B)


def store_prompts(
    graphdef: Any,
    weights: Any,
    batch: Batch,
    token_T: jax.Array,
    start_P: jax.Array,
    source_B: jax.Array,
) -> tuple[Batch, jax.Array, jax.Array, jax.Array]:
    """Stores packed prompt tokens, cut into rows at ``start_P``.

    ``source_B`` is, for every row that draws now, the row whose last hidden state it draws from:
    itself, or the sibling whose prompt it forks. B: none. Returns ``(batch', logits_BV, draws_B,
    fits)``; where it does not ``fit``, nothing was stored.
    """
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
    cache = cache.fork(jnp.where(further_B, source_B, sizes.B)).slide()
    last_B = jnp.clip(start_P[source_B + 1] - 1, 0, sizes.T - 1)
    return batch.replace(cache=cache), model.logits(hidden_TE[last_B]), draws_B, fits


def forward(graphdef: Any, weights: Any, batch: Batch) -> tuple[Batch, jax.Array, jax.Array]:
    """Stores every live row's last token. Returns the batch, logits [B, V] and whether it fits."""
    cache, fits = batch.cache.grow(batch.live_B.astype(jnp.int32), most_tokens=1)
    # Where it does not fit no row is live for this step, and nothing is stored.
    view, position_B = cache.view(batch.live_B & fits, None, batch.live_B.shape[0])
    model = nnx.merge(graphdef, weights)
    hidden_BE, view = model(batch.token_B, position_B, view)
    return batch.replace(cache=cache.keep(view).slide()), model.logits(hidden_BE), fits
