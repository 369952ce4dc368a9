"""A decoder of the Llama family in Flax NNX: packed tokens in, hidden states and the cache out.

Tokens of all rows stand packed along one axis, each with its position; which row a token belongs
to is the cache view's business. The model is the same object over a dense and over a paged cache
("without requiring any changes to the model", Kwon et al., SOSP 2023, section 4). Layers are
unrolled: a scan over stacked weights copies each layer's out of the stack, half as much time again
on CPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax.config import ModelConfig
from paged_jax.model import layers, rotary
from paged_jax.model.linear import Linear, project
from paged_jax.model.views import View
from pallas_kernels import dims


class Decoder(nnx.Module):
    """Embedding, layers, final norm, output head. ``Decoder(config, rngs=...)`` draws weights."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.vocabulary, config.width)
        self.embedding = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), shape, config.dtype)
        )
        self.layers = nnx.List(
            [layers.Layer(config, layer, rngs) for layer in range(config.layers)]
        )
        self.norm = layers.RMSNorm(config.width, config)
        self.head = (
            None
            if config.tied_embedding
            else Linear(config.width, config.vocabulary, config, bias=False, rngs=rngs)
        )

    def __call__[V: View](
        self, token_T: jax.Array, position_T: jax.Array, view: V
    ) -> tuple[jax.Array, V]:
        """Hidden states [T, width] of a step's tokens, and the view with their keys and values."""
        dims(token_T=token_T, position_T=position_T)
        config = self.config
        x_TE = self.embedding[...][token_T]
        if config.embedding_scale != 1:
            x_TE *= jnp.asarray(config.embedding_scale, x_TE.dtype)
        angles = rotary.angles(config.rotary, config.head_width, position_T)
        local = angles
        if config.local_rotary is not None:
            local = rotary.angles(config.local_rotary, config.head_width, position_T)
        for layer in self.layers:
            windowed = layer.attention.window is not None
            x_TE, view = layer(x_TE, local if windowed else angles, view)
        return self.norm(x_TE), view

    def logits(self, hidden_TE: jax.Array) -> jax.Array:
        """Logits [T, V] in f32 of hidden states."""
        head = self.embedding if self.head is None else self.head.weight
        logits_TV = project(hidden_TE, head[...], jnp.float32)
        cap = self.config.logit_soft_cap
        return logits_TV if cap is None else cap * jnp.tanh(logits_TV / cap)
