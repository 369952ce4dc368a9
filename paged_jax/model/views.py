"""What a decoder sees of a KV cache: one method that stores a step's keys and values and attends.

Both views take the same packed queries. ``PagedView`` finds a row's tokens through a block table in
a pool that holds all layers of a cache group, layer l's block b in row ``l * blocks + b``: a layer
is an offset on its group's table, and the pool is carried through the layers whole, never sliced.
``DenseView`` has a row of ``max_length`` slots a sequence and masks what is not there; it is the
definition of the other, and the baseline.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.memory.kv_cache import KVCache
from pallas_kernels import dims, paged_attention


class View(Protocol):
    """A KV cache as a decoder's layer sees it."""

    def attend(
        self,
        layer: int,
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, Self]:
        """Stores the keys and values of a layer, then attends: output [T, H, D], and the view."""
        ...


class PagedView(flax.struct.PyTreeNode):
    """A step's rows over a paged cache: row b's queries are its last stored tokens."""

    cache: KVCache
    tables: tuple[jax.Array, ...]  # i32 [B, M] of each cache group: blocks of its first layer
    length_B: jax.Array  # i32, stored tokens, this step's included
    slots: tuple[jax.Array, ...]  # i32 [T]: where tokens go in that layer; past the pool: nowhere
    # Of each layer: its group, and which layer of it.
    places: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)
    query_start_P: jax.Array | None = None  # i32; None: one token a row
    backend: str | None = flax.struct.field(pytree_node=False, default=None)
    interpret: Any = flax.struct.field(pytree_node=False, default=False)

    def attend(
        self,
        layer: int,
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, Self]:
        """As ``View.attend``, through the block table."""
        group, nth = self.places[layer]
        one = self.replace(tables=(self.tables[group],), slots=(self.slots[group],))
        out_THD, cache = _attend_paged(
            one, jnp.int32(nth), q_THD, k_TKD, v_TKD, scale, window, soft_cap
        )
        return out_THD, self.replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def _attend_paged(
    view: PagedView,
    layer: jax.Array,
    q_THD: jax.Array,
    k_TKD: jax.Array,
    v_TKD: jax.Array,
    scale: float | None,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, KVCache]:
    """A function of its own so that layers which differ in weights alone share one trace.

    ``view`` is of one cache group, ``layer`` counts its layers.
    """
    (table_BM,), (slot_T,) = view.tables, view.slots
    cache = view.cache.write(layer, k_TKD, v_TKD, slot_T)
    # Cells past a row's length, or behind its window, may name any block: they are never read.
    out_THD = paged_attention(
        q_THD,
        cache.kv_NUKSD,
        table_BM + layer * cache.blocks,
        view.length_B,
        view.query_start_P,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=cache.k_scale_NKS,
        v_scale=cache.v_scale_NKS,
        backend=view.backend,
        interpret=view.interpret,
    )
    return out_THD, cache


class CausalView(flax.struct.PyTreeNode):
    """Whole texts of one length at once, nothing stored: what training and scoring need."""

    length: int = flax.struct.field(pytree_node=False)  # tokens of a text; T is a multiple

    def attend(
        self,
        layer: int,
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, Self]:
        """As ``View.attend``, over each text's own tokens."""
        sizes = dims(q_THD=q_THD, k_TKD=k_TKD, v_TKD=v_TKD)
        q = q_THD.reshape(-1, self.length, sizes.K, sizes.H // sizes.K, sizes.D)
        k, v = (x.reshape(-1, self.length, sizes.K, sizes.D) for x in (k_TKD, v_TKD))
        logit = jnp.einsum("bikgd,bjkd->bkgij", q, k, preferred_element_type=jnp.float32)
        logit = _cap(logit * (sizes.D**-0.5 if scale is None else scale), soft_cap)
        place = jnp.arange(self.length)
        seen = _visible(place[:, None] - place, window)
        weight = jax.nn.softmax(jnp.where(seen, logit, -jnp.inf), axis=-1).astype(v.dtype)
        out = jnp.einsum("bkgij,bjkd->bikgd", weight, v, preferred_element_type=jnp.float32)
        return out.reshape(q_THD.shape).astype(q_THD.dtype), self


class DenseView(flax.struct.PyTreeNode):
    """A step's rows over a contiguous cache of ``max_length`` slots a row and layer."""

    kv_LUBKSD: jax.Array  # S: max_length
    row_T: jax.Array  # i32, each token's row; B for padding
    position_T: jax.Array  # i32, each token's place in its row

    def attend(
        self,
        layer: int,
        q_THD: jax.Array,
        k_TKD: jax.Array,
        v_TKD: jax.Array,
        *,
        scale: float | None,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[jax.Array, Self]:
        """As ``View.attend``, with every slot of a token's row scored and masked."""
        sizes = dims(q_THD=q_THD, k_TKD=k_TKD, v_TKD=v_TKD, row_T=self.row_T)
        kv = self.kv_LUBKSD
        for side, new_TKD in enumerate((k_TKD, v_TKD)):
            kv = kv.at[layer, side, self.row_T, :, self.position_T].set(
                new_TKD.astype(kv.dtype), mode="drop"
            )
        k_TKSD, v_TKSD = kv[layer][:, self.row_T]
        q_TKGD = q_THD.reshape(sizes.T, sizes.K, -1, sizes.D)
        logit = jnp.einsum(
            "tkgd,tksd->tkgs", q_TKGD, k_TKSD, preferred_element_type=jnp.float32
        ) * (sizes.D**-0.5 if scale is None else scale)
        logit = _cap(logit, soft_cap)
        seen_TS = _visible(self.position_T[:, None] - jnp.arange(kv.shape[4]), window)
        weight = jax.nn.softmax(jnp.where(seen_TS[:, None, None], logit, -jnp.inf), axis=-1)
        out = jnp.einsum("tkgs,tksd->tkgd", weight, v_TKSD, preferred_element_type=jnp.float32)
        return out.reshape(q_THD.shape).astype(q_THD.dtype), self.replace(kv_LUBKSD=kv)


def _cap(logit: jax.Array, soft_cap: float | None) -> jax.Array:
    return logit if soft_cap is None else soft_cap * jnp.tanh(logit / soft_cap)


def _visible(distance: jax.Array, window: int | None) -> jax.Array:
    """Whether a query sees a key ``distance`` tokens before it."""
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
