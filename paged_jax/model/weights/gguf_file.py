"""GGUF files, quantised or not, read through the ``gguf`` package.

Weights are dequantised to the model's type. Files of the Llama family keep the rows of queries and
keys for rotary pairs that are neighbours; Qwen's do not. Rotary factors that a file stores as a
tensor are refused: they belong in a config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paged_jax.config import ModelConfig, RotaryConfig
from paged_jax.model.weights import assembly

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PARTS = {
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.output": "attn_output",
    "attention.query_norm": "attn_q_norm",
    "attention.key_norm": "attn_k_norm",
    "attention_norm": "attn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp_norm": "ffn_norm",
}
_WHOLE = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}


def load(path: Path, dtype: str | None = None) -> assembly.Loaded:
    """The model of a file. Raises ``ValueError`` naming the file and what is wrong in it."""
    reader = open_reader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config, architecture = _config(reader, tensors, dtype)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{path}: {error}") from None

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        try:
            return gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ValueError(f"{path}: {name}: type {kind} is not supported") from None

    decoder = assembly.assemble(
        config,
        assembly.Tensors(origin=str(path), names=tensors.keys(), read=read),
        _name,
        interleaved=architecture == "llama",
    )
    end = reader.fields.get("tokenizer.ggml.eos_token_id")
    end_ids = () if end is None else (int(end.contents()),)
    return assembly.Loaded(config=config, decoder=decoder, end_ids=end_ids)


def open_reader(path: Path) -> gguf.GGUFReader:
    """The file's reader; ``ValueError`` where it is not a whole GGUF file."""
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path}: not a readable GGUF file: {error}") from None


def field(reader: gguf.GGUFReader, name: str, default: Any = None) -> Any:
    """A metadata value as Python's; ``KeyError`` where it is absent without a default."""
    found = reader.fields.get(name)
    if found is None:
        if default is None:
            raise KeyError(name)
        return default
    return found.contents()


def _config(
    reader: gguf.GGUFReader, tensors: dict[str, Any], dtype: str | None
) -> tuple[ModelConfig, str]:
    architecture = field(reader, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture {architecture} is not supported, {', '.join(ARCHITECTURES)} are"
        )

    def value(name: str, default: Any = None) -> Any:
        return field(reader, f"{architecture}.{name}", default)

    if "rope_freqs.weight" in tensors:
        raise ValueError("tensor rope_freqs.weight: rotary factors in a tensor are not supported")
    if value("rope.scaling.type", "none") not in ("none", ""):
        raise ValueError(f"rope scaling {value('rope.scaling.type')} is not supported in GGUF")
    heads, width = value("attention.head_count"), value("embedding_length")
    config = ModelConfig(
        vocabulary=int(tensors["token_embd.weight"].shape[1]),
        width=width,
        layers=value("block_count"),
        query_heads=heads,
        kv_heads=value("attention.head_count_kv", heads),
        head_width=value("attention.key_length", width // heads),
        mlp_width=value("feed_forward_length"),
        max_length=value("context_length"),
        # Stored in f32: the shortest decimal of that is what was meant.
        norm_epsilon=float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
        rotary=RotaryConfig(theta=float(value("rope.freq_base", 1e4))),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied_embedding="output.weight" not in tensors,
        dtype=dtype or "float32",
    )
    return config, architecture


def _name(path: str) -> str:
    stem, *_ = path.split(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.weight"
    _layers, layer, rest = path.split(".", 2)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_PARTS[part]}.{kind}"
