"""Training a decoder on packed text: next-token loss, AdamW, accumulation, as pure functions.

A step draws its windows of text from ``fold_in(key, step)``, so a run that was cut off goes on
exactly where a checkpoint left it: the state is weights, optimizer and step number, nothing else.
Weights and optimizer are f32; the forward and backward pass run in the model's type.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from paged_jax.config import ModelConfig, TrainConfig
from paged_jax.model.decoder import Decoder
from paged_jax.model.views import CausalView


class TrainState(flax.struct.PyTreeNode):
    """What a step changes."""

    weights: Any  # f32
    optimizer: Any
    step: jax.Array  # i32, steps done


def create(model: ModelConfig, config: TrainConfig) -> tuple[Any, TrainState]:
    """The graph of a decoder and the state before the first step."""
    graphdef, weights = nnx.split(Decoder(model, rngs=nnx.Rngs(config.seed)))
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
    return graphdef, TrainState(weights, optimizer(config).init(weights), jnp.int32(0))


def optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with clipping; matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config),
            b1=0.9,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=lambda weights: jax.tree.map(lambda leaf: leaf.ndim > 1, weights),
        ),
    )


def schedule(config: TrainConfig) -> optax.Schedule:
    """A linear warm-up to the peak rate, then a cosine to a tenth of it."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.peak_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=config.peak_rate / 10,
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "config"), donate_argnames="state")
def train(
    graphdef: Any, state: TrainState, text_N: jax.Array, steps: jax.Array, *, config: TrainConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """``steps`` steps on windows of ``text_N`` (token ids). Returns the state and mean metrics.

    Metrics: ``loss``, nats a token, and ``gradient_norm`` before clipping.
    """

    def step(_: jax.Array, carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, sums = carry
        loss, gradient = _gradient(graphdef, state, text_N, config)
        updates, moments = optimizer(config).update(gradient, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        sums += jnp.stack([loss, optax.tree.norm(gradient)])
        return TrainState(weights, moments, state.step + 1), sums

    state, sums = lax.fori_loop(0, steps, step, (state, jnp.zeros(2)))
    loss, norm = sums / steps
    return state, {"loss": loss, "gradient_norm": norm}


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "rows"))
def evaluate(
    graphdef: Any, weights: Any, text_N: jax.Array, config: TrainConfig, rows: int
) -> jax.Array:
    """Mean nats a token over ``rows`` windows that lie evenly in a text, always the same ones."""
    begin = jnp.linspace(0, text_N.shape[0] - config.length - 1, rows).astype(jnp.int32)

    def add(total: jax.Array, begin: jax.Array) -> tuple[jax.Array, None]:
        window = lax.dynamic_slice_in_dim(text_N, begin, config.length + 1)
        return total + loss(weights, graphdef, window[None]), None

    return lax.scan(add, jnp.zeros(()), begin)[0] / rows


def _gradient(
    graphdef: Any, state: TrainState, text_N: jax.Array, config: TrainConfig
) -> tuple[jax.Array, Any]:
    """Mean loss and gradient of a step, summed over microbatches."""
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    shape = (config.accumulate, config.rows)
    begin = jax.random.randint(key, shape, 0, text_N.shape[0] - config.length)

    def add(sums: tuple[jax.Array, Any], begin_B: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        window = text_N[begin_B[:, None] + jnp.arange(config.length + 1)]
        one = jax.value_and_grad(loss)(state.weights, graphdef, window)
        return jax.tree.map(jnp.add, sums, one), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.weights))
    (total, gradient), _ = lax.scan(add, zero, begin)
    return total / config.accumulate, jax.tree.map(lambda g: g / config.accumulate, gradient)


def loss(weights: Any, graphdef: Any, window: jax.Array) -> jax.Array:
    """Mean nats a token of predicting each text's next token; ``window`` is [texts, length + 1]."""
    length = window.shape[1] - 1
    dtype = nnx.merge(graphdef, weights).config.dtype
    model = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(dtype), weights))
    token_T = window[:, :-1].reshape(-1).astype(jnp.int32)
    position_T = jnp.tile(jnp.arange(length, dtype=jnp.int32), window.shape[0])
    hidden_TE, _ = model(token_T, position_T, CausalView(length=length))
    target_T = window[:, 1:].reshape(-1).astype(jnp.int32)
    nats_T = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden_TE), target_T)
    return nats_T.mean()
