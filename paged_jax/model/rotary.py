"""Rotary position embedding: pairs of components (i, i + D/2) turned by position * frequency i.

``q . k`` then depends on the distance of two tokens alone. Frequencies are ``theta ** (-2i / D)``,
rescaled once, on the host, for contexts longer than the model was trained on; sources beside
``config.RotaryConfig``.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import RotaryConfig
from pallas_kernels import dims


def frequencies(config: RotaryConfig, width: int) -> tuple[np.ndarray, float]:
    """Radians a token of each of ``width / 2`` pairs, f64, and the factor of queries and keys."""
    exponent = np.arange(0, width, 2) / width
    plain = config.theta**-exponent
    if config.scaling == "none":
        return plain, 1.0
    if config.scaling == "linear":
        return plain / config.factor, 1.0
    if config.scaling == "ntk":
        theta = config.theta * config.factor ** (width / (width - 2))
        return theta**-exponent, 1.0
    if config.scaling == "llama3":
        turns = config.original_length * plain / (2 * math.pi)
        low, high = config.low_frequency_factor, config.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return plain * (kept + (1 - kept) / config.factor), 1.0
    return _yarn(config, plain)


def _yarn(config: RotaryConfig, plain: np.ndarray) -> tuple[np.ndarray, float]:
    """YaRN, sections 3.2 (ramp over pairs) and 3.4 (temperature, here a factor of q and k)."""
    width = 2 * len(plain)

    def pair_with_turns(turns: float) -> float:
        wavelength = config.original_length / turns
        return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.theta))

    first = max(math.floor(pair_with_turns(config.beta_fast)), 0)
    last = min(math.ceil(pair_with_turns(config.beta_slow)), width - 1)
    divided = np.clip((np.arange(len(plain)) - first) / max(last - first, 1e-3), 0, 1)
    factor = config.attention_factor
    if factor is None:
        factor = 0.1 * math.log(config.factor) + 1
    return plain * (1 - divided + divided / config.factor), factor


def angles(config: RotaryConfig, width: int, position_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [T, width / 2] in f32 of the turns at some positions."""
    frequency, factor = frequencies(config, width)
    turn = position_T.astype(jnp.float32)[:, None] * jnp.asarray(frequency, jnp.float32)
    return factor * jnp.cos(turn), factor * jnp.sin(turn)


def rotate(x_THD: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs of every head; computed in f32, returned in x's type."""
    dims(x_THD=x_THD)
    cosine, sine = (part[:, None, :] for part in angles)
    first, second = jnp.split(x_THD.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return turned.astype(x_THD.dtype)
