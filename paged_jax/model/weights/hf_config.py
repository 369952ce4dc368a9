"""Hugging Face ``config.json`` as a ``ModelConfig``; what this decoder is not is refused by name.

Families: Llama (SmolLM too), Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax.config import ModelConfig, RotaryConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


def read(path: Path, dtype: str | None = None) -> ModelConfig:
    """The config of a ``config.json``, in ``dtype`` or the file's own type.

    Raises ``ValueError`` naming the file and the field.
    """
    found = fields(path)
    named = found.get("architectures")
    architecture = named[0] if named and isinstance(named, list) else "none named"
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {architecture} is not supported, {', '.join(ARCHITECTURES)} are"
        )
    family = ARCHITECTURES[architecture]
    try:
        return _config(found, family, dtype)
    except KeyError as error:
        raise ValueError(f"{path}: field {error} is missing") from None
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path}: {error}") from None


def fields(path: Path) -> dict[str, Any]:
    """The object of a JSON file; ``ValueError`` naming the file where there is none."""
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, got {type(found).__name__}")
    return found


def _config(fields: Mapping[str, Any], family: str, dtype: str | None) -> ModelConfig:
    gemma = family.startswith("gemma")
    heads = fields["num_attention_heads"]
    head_width = fields.get("head_dim") or fields["hidden_size"] // heads
    biased = bool(fields.get("attention_bias", False))
    rotary, local_rotary = _rotaries(fields, family)
    scale = fields["query_pre_attn_scalar"] ** -0.5 if gemma else None
    stored = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    return ModelConfig(
        vocabulary=fields["vocab_size"],
        width=fields["hidden_size"],
        layers=fields["num_hidden_layers"],
        query_heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_width=head_width,
        mlp_width=fields["intermediate_size"],
        max_length=fields["max_position_embeddings"],
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        norm_offset=1.0 if gemma else 0.0,
        activation=_activation(fields),
        rotary=rotary,
        local_rotary=local_rotary,
        windows=_windows(fields, family),
        qkv_bias=biased or family == "qwen2",
        output_bias=biased and family != "qwen2",
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        tied_embedding=bool(fields.get("tie_word_embeddings", gemma)),
        attention_scale=scale,
        attention_soft_cap=fields.get("attn_logit_softcapping"),
        logit_soft_cap=fields.get("final_logit_softcapping"),
        embedding_scale=fields["hidden_size"] ** 0.5 if gemma else 1.0,
        dtype=dtype or _DTYPES.get(stored, stored),
    )


def _activation(fields: Mapping[str, Any]) -> str:
    name = fields.get("hidden_activation") or fields.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act: {name!r} is not supported, {', '.join(_ACTIVATIONS)} are")
    return _ACTIVATIONS[name]


def _windows(fields: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """The window of each layer; () where every layer sees everything."""
    window = fields.get("sliding_window")
    layers = fields["num_hidden_layers"]
    if window is None or (family.startswith("qwen") and not fields.get("use_sliding_window")):
        return ()
    if fields.get("layer_types"):
        windowed = [kind == "sliding_attention" for kind in fields["layer_types"]]
    elif family == "mistral":
        windowed = [True] * layers
    elif family == "gemma2":
        windowed = [layer % 2 == 0 for layer in range(layers)]
    elif family == "gemma3":
        pattern = fields.get("sliding_window_pattern", 6)
        windowed = [(layer + 1) % pattern != 0 for layer in range(layers)]
    elif family.startswith("qwen"):
        windowed = [layer >= fields["max_window_layers"] for layer in range(layers)]
    else:
        windowed = [False] * layers
    return tuple(window if on else None for on in windowed)


def _rotaries(fields: Mapping[str, Any], family: str) -> tuple[RotaryConfig, RotaryConfig | None]:
    """The rotary embedding of layers that see everything, and of windowed ones if it differs."""
    parameters = fields.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        local = parameters.get("sliding_attention")
        return (
            _rotary(parameters["full_attention"], fields),
            _rotary(local, fields) if local else None,
        )
    if parameters is None:
        scaling = fields.get("rope_scaling") or {}
        theta = fields.get("rope_theta", 1e6 if family == "gemma3" else 1e4)
        parameters = {"rope_theta": theta, **scaling}
    local_theta = fields.get("rope_local_base_freq", 1e4 if family == "gemma3" else None)
    local = RotaryConfig(theta=float(local_theta)) if local_theta is not None else None
    return _rotary(parameters, fields), local


def _rotary(parameters: Mapping[str, Any], fields: Mapping[str, Any]) -> RotaryConfig:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta", 1e4))
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise ValueError("partial_rotary_factor: only whole heads are rotated here")
    if kind == "default":
        return RotaryConfig(theta=theta)
    factor = float(parameters["factor"])
    if kind == "linear":
        return RotaryConfig(theta=theta, scaling="linear", factor=factor)
    original = parameters.get("original_max_position_embeddings", fields["max_position_embeddings"])
    if kind == "llama3":
        return RotaryConfig(
            theta=theta,
            scaling="llama3",
            factor=factor,
            original_length=original,
            low_frequency_factor=float(parameters["low_freq_factor"]),
            high_frequency_factor=float(parameters["high_freq_factor"]),
        )
    if kind == "yarn":
        for name in ("mscale", "mscale_all_dim"):
            if parameters.get(name) is not None:
                raise ValueError(f"rope {name}: not supported, attention_factor is")
        if parameters.get("truncate", True) is not True:
            raise ValueError("rope truncate: only true is supported")
        return RotaryConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_length=original,
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            attention_factor=parameters.get("attention_factor"),
        )
    raise ValueError(f"rope_type: {kind!r} is not supported, default, linear, llama3 and yarn are")
