"""Axis letters: an array's name ends in one capital per axis, and one function checks them.

``dims(q_THD=q, table_BM=table)`` reads every size off the shapes at trace time and raises when
two arrays disagree about a letter. The key, one letter an axis, for the whole project:

====== ============================================ ====== =====================================
letter axis                                         letter axis
====== ============================================ ====== =====================================
``B``  rows (sequences) of a block table            ``T``  query tokens of a step, packed
``M``  logical blocks of a sequence                 ``N``  physical blocks, or slots, of a pool
``S``  slots of a block                             ``C``  block copies
``H``  query heads                                  ``K``  key/value heads
``G``  query heads of a kv head, H / K              ``D``  head width
``U``  2: keys and values                           ``L``  layers
``V``  vocabulary                                   ``P``  B + 1 offsets of packed rows
``Q``  most query tokens of a row or of a tile      ``W``  table cells a row may gain in a step
``R``  requests of a workload                       ``F``  samples of a request (fan-out)
``X``  common prefixes of a workload                ``J``  recorded metrics
``Y``  sequences of a workload, R * F               ``Z``  nodes of linked lists, heads last; cells
``A``  words of a bitmap and the levels above it    ``I``  query tiles of a kernel launch
``E``  width of a model's residual stream
====== ============================================ ====== =====================================
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

AXES = frozenset("ABMSHGUVQRXYTNCKDLPWFJZIE")


def dims(**arrays: Any) -> types.SimpleNamespace:
    """Sizes by axis letter, read off arrays named ``name_LETTERS``.

    Returns a namespace with one integer attribute per letter, ``dims(table_BM=t).B``.
    Raises ``ValueError`` when a rank differs from the number of letters, when two arrays give one
    letter different sizes, or when a letter is not in the key above.
    """
    sizes: dict[str, int] = {}
    seen: dict[str, str] = {}
    for name, array in arrays.items():
        letters = name.rpartition("_")[2]
        if not letters or not set(letters) <= AXES:
            raise ValueError(f"{name}: the name must end in axis letters of {sorted(AXES)}")
        shape = np.shape(array)
        if len(shape) != len(letters):
            raise ValueError(f"{name}: expected {len(letters)} axes ({letters}), got shape {shape}")
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name}: axis {letter} has size {size}, but {seen[letter]} gave it"
                    f" {sizes[letter]}"
                )
            seen.setdefault(letter, name)
    return types.SimpleNamespace(**sizes)
