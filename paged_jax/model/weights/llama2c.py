"""llama2.c's first ``.bin`` format: seven int32, then every weight in f32, in a fixed order.

The sizes are width, MLP width, layers, query heads, kv heads, vocabulary (negative where the head
is not the embedding) and context; two tables of rotary angles, of no use here, stand before the
head. Rotary pairs are neighbours.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from paged_jax.config import ModelConfig
from paged_jax.model.weights import assembly

_HEADER_BYTES = 28
_END_IDS = (1, 2)  # a new text begins, or this one ends: the file itself does not say


def load(path: Path, dtype: str | None = None) -> assembly.Loaded:
    """The model of a file. Raises ``ValueError`` naming the file and what is wrong in it."""
    if path.stat().st_size < _HEADER_BYTES:
        raise ValueError(f"{path}: not a llama2.c model: shorter than its header of 28 bytes")
    header = np.fromfile(path, "<i4", count=7).tolist()
    width, mlp_width, layers, query_heads, kv_heads, vocabulary, max_length = header
    try:
        config = ModelConfig(
            vocabulary=abs(vocabulary),
            width=width,
            layers=layers,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_width=width // max(query_heads, 1),
            mlp_width=mlp_width,
            max_length=max_length,
            tied_embedding=vocabulary > 0,
            dtype=dtype or "float32",
        )
    except ValueError as error:
        raise ValueError(f"{path}: not a llama2.c model: {error}") from None
    shapes = _shapes(config)
    starts = np.cumsum([0, *(math.prod(shape) for shape in shapes.values())])
    expected = _HEADER_BYTES + 4 * int(starts[-1])
    if path.stat().st_size != expected:
        raise ValueError(
            f"{path}: not a llama2.c model: expected {expected} bytes for its header,"
            f" got {path.stat().st_size}"
        )
    stored = np.memmap(path, "<f4", "r", offset=_HEADER_BYTES)
    stacks = {
        name: stored[start : start + math.prod(shape)].reshape(shape)
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }

    def read(name: str) -> np.ndarray:
        stack, _, layer = name.partition("/")
        return stacks[stack][int(layer)] if layer else stacks[stack]

    names = {
        f"{name}/{layer}" if name.startswith("layers.") else name
        for name in shapes
        for layer in range(layers)
    }
    tensors = assembly.Tensors(origin=str(path), names=names, read=read)
    decoder = assembly.assemble(
        config, tensors, _name, interleaved=True, spare=lambda name: name.startswith("angles")
    )
    return assembly.Loaded(config=config, decoder=decoder, end_ids=_END_IDS)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Arrays in the file's order; those of layers are stacked."""
    width, layers = config.width, config.layers
    query_width = config.query_heads * config.head_width
    kv_width = config.kv_heads * config.head_width
    angles = (config.max_length, config.head_width // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocabulary, width),
        "layers.attention_norm": (layers, width),
        "layers.attention.query": (layers, query_width, width),
        "layers.attention.key": (layers, kv_width, width),
        "layers.attention.value": (layers, kv_width, width),
        "layers.attention.output": (layers, width, query_width),
        "layers.mlp_norm": (layers, width),
        "layers.mlp.gate": (layers, config.mlp_width, width),
        "layers.mlp.down": (layers, width, config.mlp_width),
        "layers.mlp.up": (layers, config.mlp_width, width),
        "norm": (width,),
        "angles.cosine": angles,
        "angles.sine": angles,
    }
    return shapes if config.tied_embedding else shapes | {"head": (config.vocabulary, width)}


def _name(path: str) -> str:
    if not path.startswith("layers."):
        return path.split(".")[0]
    _layers, layer, rest = path.split(".", 2)
    return f"layers.{rest.rpartition('.')[0]}/{layer}"
