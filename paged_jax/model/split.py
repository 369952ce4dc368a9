"""A decoder as compiled programs take it: what they are compiled for, and a list of weights.

Flax's own split hashes and compares every module of the model and sorts its weights by name, in
every call of a program: 10 ms for 30 layers, as long as a small model computes. Here both are done
once, and each call passes an object that is only equal to itself and a flat list.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from paged_jax.model.decoder import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """A decoder without its weights. One object stands for all decoders that are built alike."""

    graphdef: Any
    tree: Any

    def decoder(self, weights: list[jax.Array]) -> Decoder:
        """The decoder with such weights, in the order of ``split``."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.tree, weights))


_graph = functools.cache(Graph)


def split(decoder: Decoder) -> tuple[Graph, list[jax.Array]]:
    """What a decoder is built of, hashable, and its weights."""
    graphdef, state = nnx.split(decoder)
    weights, tree = jax.tree.flatten(state)
    return _graph(graphdef, tree), weights
