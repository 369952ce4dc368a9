"""A few combinations that hold every pair of values of any two factors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def pairwise(
    factors: Mapping[str, Sequence[Any]], keep: Callable[[dict[str, Any]], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """Greedy: next is what holds most pairs not seen yet; those that ``keep`` rejects are none."""
    every = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    left = {
        index: pairs(combination) for index, combination in enumerate(every) if keep(combination)
    }
    chosen, seen = [], set[Any]()
    while left:
        best = max(left, key=lambda index: len(left[index]))
        chosen.append(every[best])
        seen |= left[best]
        left = {index: new for index, held in left.items() if (new := held - seen)}
    return chosen


def pairs(combination: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(combination.items(), 2))
