"""Cache groups: a model's layers, cut into groups of equal size that share one pool of blocks.

The layers of a group see alike, the last ``window`` tokens or all of them, and have one block
table; a block is ``block_size`` slots in the layers of one group, so all blocks are of equal bytes
and any group may take any of them. With n tokens stored the next query, at position n, sees itself
and ``window - 1`` tokens before it: max(0, n - window + 1) tokens are behind its window, and a
block all of whose tokens are is read by nobody any more.

All functions are arithmetic on counts, host values or traced.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paged_jax.config import ModelConfig
from paged_jax.memory.layout import blocks_of

Windows = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheGroups:
    """Which layers share a block table."""

    windows: Windows  # of each group: tokens that its layers see, None for all
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and which layer of it

    @property
    def count(self) -> int:
        """Groups: a token takes a slot in each."""
        return len(self.windows)

    @property
    def layers(self) -> int:
        """Layers of each group."""
        return len(self.places) // self.count


def whole(layers: int) -> CacheGroups:
    """All layers in one group that keeps every token."""
    return CacheGroups((None,), tuple((0, layer) for layer in range(layers)))


def by_window(model: ModelConfig) -> CacheGroups:
    """As few groups as keep layers of different windows apart, in the order of their layers.

    Their size divides the number of layers of every window, so none is padded. A window that no
    sequence of ``max_length`` tokens outgrows is none.
    """
    visible = [model.window(layer) for layer in range(model.layers)]
    visible = [None if seen is None or seen >= model.max_length else seen for seen in visible]
    size = math.gcd(*collections.Counter(visible).values())
    layers_of: dict[tuple[int | None, int], list[int]] = {}
    met: collections.Counter[int | None] = collections.Counter()
    for layer, window in enumerate(visible):
        layers_of.setdefault((window, met[window] // size), []).append(layer)
        met[window] += 1
    place = {
        layer: (group, nth)
        for group, layers in enumerate(layers_of.values())
        for nth, layer in enumerate(layers)
    }
    return CacheGroups(
        windows=tuple(window for window, _ in layers_of),
        places=tuple(place[layer] for layer in range(model.layers)),
    )


def cells_behind(stored: Any, window: Any, block_size: int) -> jax.Array:
    """Cells of a table, from the first on, whose tokens are all behind the window."""
    return jnp.maximum(stored - window + 1, 0) // block_size


def most_held(window: int, step_tokens: Any, block_size: int) -> Any:
    """Blocks that a row holds in a group with a window, at most.

    What a step's ``step_tokens`` queries see, ``window - 1`` tokens before the first and their own,
    which need not begin or end with a block.
    """
    return blocks_of(window - 1 + step_tokens, block_size) + 1


def most_blocks(
    windows: Windows,
    blocks: Any,
    rows: Any,
    step_tokens: Any,
    block_size: int,
    *,
    least: Callable[[Any, Any], Any] = jnp.minimum,
) -> Any:
    """Blocks in all groups of ``rows`` rows, at most, that hold ``blocks`` if every token is kept.

    ``step_tokens``: of one step, at most; ``least``: the smaller of two, ``min`` for host values.
    """

    def held(window: int | None) -> Any:
        if window is None:
            return blocks
        # A row alone holds no more than all: or the product might pass 32 bits.
        alone = least(blocks, most_held(window, step_tokens, block_size))
        return least(blocks, rows * alone)

    return sum(map(held, windows[1:]), held(windows[0]))
