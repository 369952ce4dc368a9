"""Small models for tests: random weights, large enough that tokens are far from alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.config import ModelConfig, RotaryConfig
from paged_jax.model.decoder import Decoder
from paged_jax.model.weights import Loaded

TINY = ModelConfig(
    vocabulary=61,
    width=24,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_width=8,
    mlp_width=40,
    max_length=64,
    rotary=RotaryConfig(theta=100.0),
)


def random_decoder(config: ModelConfig, seed: int = 1) -> Decoder:
    """Weights far larger than a fresh model's, so that every option shows in the logits."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(seed)
    drawn = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.3, leaf.dtype), state
    )
    return nnx.merge(graphdef, drawn)


def tiny(end_ids: tuple[int, ...] = (), seed: int = 1) -> Loaded:
    """A model of two layers and 61 tokens."""
    return Loaded(config=TINY, decoder=random_decoder(TINY, seed), end_ids=end_ids)
