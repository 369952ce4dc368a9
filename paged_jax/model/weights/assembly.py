"""From named tensors of any file format to a decoder: every weight found, of its shape, none left.

Some formats store the rows of queries and keys for rotary pairs (2i, 2i + 1), which are put in this
project's order (i, i + D/2) here. Weights are read one by one, so the host never holds the file
twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.config import ModelConfig
from paged_jax.model.decoder import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensors:
    """A file's tensors by name."""

    origin: str  # for messages
    names: Collection[str]
    read: Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model as it was found."""

    config: ModelConfig
    decoder: Decoder
    end_ids: tuple[int, ...]  # tokens that end an output


def assemble(
    config: ModelConfig,
    tensors: Tensors,
    name_of: Callable[[str], str],
    *,
    interleaved: bool = False,
    spare: Callable[[str], bool] = lambda name: False,
) -> Decoder:
    """A decoder with the file's weights, in the config's type.

    ``name_of`` gives the file's name of a weight of ours ("layers.0.attention.query.weight");
    ``interleaved`` says that rotary pairs are neighbours in the file; tensors for which ``spare``
    holds may be left over. Raises ``ValueError`` naming a tensor that is missing, has a wrong
    shape, or is not part of such a decoder.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    weights = dict(nnx.to_flat_state(abstract))
    names = {path: name_of(".".join(map(str, path))) for path in weights}
    missing = [name for name in names.values() if name not in tensors.names]
    if missing:
        raise ValueError(f"{tensors.origin}: tensor {missing[0]} is missing{_more(missing)}")
    unknown = sorted(name for name in set(tensors.names) - set(names.values()) if not spare(name))
    if unknown:
        raise ValueError(
            f"{tensors.origin}: tensor {unknown[0]} is not part of this decoder{_more(unknown)}"
        )
    for path, weight in weights.items():
        array = _read(tensors, names[path], path, weight.shape, config, interleaved)
        weights[path] = weight.replace(jnp.asarray(array, config.dtype))
    return nnx.merge(graphdef, nnx.from_flat_state(weights))


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _read(
    tensors: Tensors,
    name: str,
    path: tuple[Any, ...],
    shape: tuple[int, ...],
    config: ModelConfig,
    interleaved: bool,
) -> np.ndarray:
    """A tensor as our weight of that path."""
    array = tensors.read(name)
    if array.shape != shape:
        raise ValueError(f"{tensors.origin}: {name}: expected shape {shape}, got {array.shape}")
    if interleaved and ("query" in path or "key" in path):
        # [heads * width, ...] with neighbours paired -> halves paired.
        pairs = array.reshape(-1, config.head_width // 2, 2, *array.shape[1:])
        array = pairs.swapaxes(1, 2).reshape(array.shape)
    return array


def count(model: Decoder) -> int:
    """Weights of a decoder."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
