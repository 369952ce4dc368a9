"""Layers of a decoder: norm, grouped-query attention over a cache view, gated MLP.

A layer computes ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, with a norm on each branch's
way out, too, where the config says so. Attention is the view's: it stores this step's keys and
values and answers the queries, so nothing here knows whether the cache is paged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.config import ModelConfig
from paged_jax.model import rotary
from paged_jax.model.linear import Linear
from paged_jax.model.views import View

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class RMSNorm(nnx.Module):
    """``x / rms(x) * (offset + weight)`` over the last axis, in f32, returned in x's type.

    Flax's own promotes bf16 inputs by its weight's type; statistics belong in f32.
    """

    def __init__(self, width: int, config: ModelConfig) -> None:
        self.weight = nnx.Param(jnp.full(width, 1 - config.norm_offset, config.dtype))
        self.epsilon = config.norm_epsilon
        self.offset = config.norm_offset

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        weight = self.offset + self.weight[...].astype(jnp.float32)
        return (wide * scale * weight).astype(x.dtype)


class Attention(nnx.Module):
    """Projections, rotary and norms around a cache view's attention."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs) -> None:
        query_width = config.query_heads * config.head_width
        kv_width = config.kv_heads * config.head_width
        self.query = Linear(config.width, query_width, config, bias=config.qkv_bias, rngs=rngs)
        self.key = Linear(config.width, kv_width, config, bias=config.qkv_bias, rngs=rngs)
        self.value = Linear(config.width, kv_width, config, bias=config.qkv_bias, rngs=rngs)
        self.output = Linear(query_width, config.width, config, bias=config.output_bias, rngs=rngs)
        self.query_norm = RMSNorm(config.head_width, config) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_width, config) if config.qk_norm else None
        self.layer = layer
        self.head_width = config.head_width
        self.scale = config.attention_scale
        self.window = config.window(layer)
        self.soft_cap = config.attention_soft_cap

    def __call__[V: View](
        self, x_TE: jax.Array, angles: tuple[jax.Array, jax.Array], view: V
    ) -> tuple[jax.Array, V]:
        queries = x_TE.shape[0]
        q, k, v = (
            project(x_TE).reshape(queries, -1, self.head_width)
            for project in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        out_THD, view = view.attend(
            self.layer,
            rotary.rotate(q, angles),
            rotary.rotate(k, angles),
            v,
            scale=self.scale,
            window=self.window,
            soft_cap=self.soft_cap,
        )
        return self.output(out_THD.reshape(queries, -1)), view


class MLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))`` (Shazeer, GLU variants, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.gate = Linear(config.width, config.mlp_width, config, bias=config.mlp_bias, rngs=rngs)
        self.up = Linear(config.width, config.mlp_width, config, bias=config.mlp_bias, rngs=rngs)
        self.down = Linear(config.mlp_width, config.width, config, bias=config.mlp_bias, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x_TE: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS[self.activation](self.gate(x_TE)) * self.up(x_TE))


class Layer(nnx.Module):
    """One layer of the decoder."""

    def __init__(self, config: ModelConfig, layer: int, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.width, config)
        self.attention_norm = norm()
        self.attention = Attention(config, layer, rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_norm = norm()
        self.mlp = MLP(config, rngs)
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__[V: View](
        self, x_TE: jax.Array, angles: tuple[jax.Array, jax.Array], view: V
    ) -> tuple[jax.Array, V]:
        out, view = self.attention(self.attention_norm(x_TE), angles, view)
        x_TE += self.attention_post_norm(out) if self.attention_post_norm is not None else out
        out = self.mlp(self.mlp_norm(x_TE))
        x_TE += self.mlp_post_norm(out) if self.mlp_post_norm is not None else out
        return x_TE, view
