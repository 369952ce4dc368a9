"""A Llama-family decoder in float64 NumPy, one token after another: the definition for tests.

Takes weights as a dictionary from this project's names to arrays, and shares no line with the
package: attention is a loop over heads and over the tokens seen, rotary turns complex numbers.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from paged_jax.config import ModelConfig, RotaryConfig


def weights_of(decoder: nnx.Module) -> dict[str, np.ndarray]:
    """A decoder's weights by dotted name, in float64."""
    state = nnx.to_flat_state(nnx.state(decoder, nnx.Param))
    return {".".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in state}


def logits(config: ModelConfig, weights: Mapping[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] of a text's every position."""
    stored: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(config.layers)]
    return np.stack(
        [_token(config, weights, token, place, stored) for place, token in enumerate(ids)]
    )


def greedy(
    config: ModelConfig, weights: Mapping[str, np.ndarray], ids: list[int], tokens: int
) -> list[int]:
    """The next tokens, the likeliest each time."""
    stored: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(config.layers)]
    drawn: list[int] = []
    for place in range(len(ids) + tokens - 1):
        token = ids[place] if place < len(ids) else drawn[place - len(ids)]
        found = _token(config, weights, token, place, stored)
        if place >= len(ids) - 1:
            drawn.append(int(np.argmax(found)))
    return drawn


def _token(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    token: int,
    place: int,
    stored: list[list[tuple[np.ndarray, np.ndarray]]],
) -> np.ndarray:
    """Logits after one more token; its keys and values are added to ``stored``."""
    x = weights["embedding"][token] * config.embedding_scale
    for layer in range(config.layers):

        def part(name: str, layer: int = layer) -> Any:
            return weights.get(f"layers.{layer}.{name}")

        out = _attention(
            config, part, layer, place, _norm(config, x, part("attention_norm.weight")), stored
        )
        x = x + (
            _norm(config, out, part("attention_post_norm.weight")) if config.post_norms else out
        )
        inner = _norm(config, x, part("mlp_norm.weight"))
        gate = _project(inner, part, "mlp.gate")
        out = _project(_activate(config, gate) * _project(inner, part, "mlp.up"), part, "mlp.down")
        if config.post_norms:
            out = _norm(config, out, part("mlp_post_norm.weight"))
        x = x + out
    x = _norm(config, x, weights["norm.weight"])
    head = weights["embedding" if config.tied_embedding else "head.weight"].T
    found = x @ head
    if config.logit_soft_cap:
        found = config.logit_soft_cap * np.tanh(found / config.logit_soft_cap)
    return found


def _attention(
    config: ModelConfig,
    part: Any,
    layer: int,
    place: int,
    x: np.ndarray,
    stored: list[list[tuple[np.ndarray, np.ndarray]]],
) -> np.ndarray:
    width = config.head_width
    window = config.windows[layer] if config.windows else None
    rotary = config.rotary if window is None or not config.local_rotary else config.local_rotary

    def heads(name: str) -> list[np.ndarray]:
        return list(_project(x, part, f"attention.{name}").reshape(-1, width))

    queries, keys, values = heads("query"), heads("key"), heads("value")
    if config.qk_norm:
        queries = [_norm(config, q, part("attention.query_norm.weight")) for q in queries]
        keys = [_norm(config, k, part("attention.key_norm.weight")) for k in keys]
    queries = [turn(rotary, q, place) for q in queries]
    keys = [turn(rotary, k, place) for k in keys]
    stored[layer].append((np.stack(keys), np.stack(values)))
    scale = width**-0.5 if config.attention_scale is None else config.attention_scale
    first = 0 if window is None else max(0, place - window + 1)
    outs = []
    for head, q in enumerate(queries):
        owner = head * config.kv_heads // config.query_heads
        scores = []
        for key, _ in stored[layer][first:]:
            score = scale * float(q @ key[owner])
            if config.attention_soft_cap:
                score = config.attention_soft_cap * math.tanh(score / config.attention_soft_cap)
            scores.append(score)
        odds = np.exp(np.array(scores) - max(scores))
        seen = stored[layer][first:]
        outs.append(
            sum(w * value[owner] for w, (_, value) in zip(odds, seen, strict=True)) / odds.sum()
        )
    return _project(np.concatenate(outs), part, "attention.output")


def turn(rotary: RotaryConfig, x: np.ndarray, place: int) -> np.ndarray:
    """A head's vector, its components i and i + D/2 one complex number, turned by its place."""
    half = len(x) // 2
    turned = x.copy()
    for pair in range(half):
        angle = place * _frequency(rotary, pair, 2 * half)
        number = complex(x[pair], x[pair + half]) * cmath.exp(1j * angle) * _magnitude(rotary)
        turned[pair], turned[pair + half] = number.real, number.imag
    return turned


def _magnitude(rotary: RotaryConfig) -> float:
    if rotary.scaling != "yarn":
        return 1.0
    if rotary.attention_factor is not None:
        return rotary.attention_factor
    return 0.1 * math.log(rotary.factor) + 1


def _frequency(rotary: RotaryConfig, pair: int, width: int) -> float:
    plain = rotary.theta ** (-2 * pair / width)
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling == "ntk":
        return (rotary.theta * rotary.factor ** (width / (width - 2))) ** (-2 * pair / width)
    if rotary.scaling == "llama3":
        wavelength = 2 * math.pi / plain
        if wavelength < rotary.original_length / rotary.high_frequency_factor:
            return plain
        if wavelength > rotary.original_length / rotary.low_frequency_factor:
            return plain / rotary.factor
        smooth = (rotary.original_length / wavelength - rotary.low_frequency_factor) / (
            rotary.high_frequency_factor - rotary.low_frequency_factor
        )
        return (1 - smooth) * plain / rotary.factor + smooth * plain
    if rotary.scaling == "yarn":

        def dimension(rotations: float) -> float:
            return (
                width
                * math.log(rotary.original_length / (rotations * 2 * math.pi))
                / (2 * math.log(rotary.theta))
            )

        low = max(math.floor(dimension(rotary.beta_fast)), 0)
        high = min(math.ceil(dimension(rotary.beta_slow)), width - 1)
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        return (plain / rotary.factor) * ramp + plain * (1 - ramp)
    return plain


def _norm(config: ModelConfig, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return (
        x / math.sqrt(float((x * x).mean()) + config.norm_epsilon) * (weight + config.norm_offset)
    )


def _project(x: np.ndarray, part: Any, name: str) -> np.ndarray:
    out = x @ part(f"{name}.weight").T
    bias = part(f"{name}.bias")
    return out if bias is None else out + bias


def _activate(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    if config.activation == "gelu":
        return x * np.array([0.5 * (1 + math.erf(one / math.sqrt(2))) for one in x])
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
