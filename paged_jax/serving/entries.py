"""What an engine tells its device of requests and rows: arrays on the host, of sizes that never
change, so that no number of requests takes a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import Any

import numpy as np

from paged_jax.config import MOST
from paged_jax.decoding import sampling
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.serving import settings
from paged_jax.serving.requests import Request

Held = tuple[Request, int]  # who sits in a row: a request, and which of its sequences


def of_slots(
    slots: Sequences[Request | None], new: list[int], tokens: int
) -> tuple[np.ndarray, ...]:
    """For ``dispatch.submit``: the requests in ``new`` slots, and everybody's rank.

    ``tokens``: of a sequence, by which a prefix cache looks prompts up; 1 without one.
    """
    rank_R = np.full(len(slots), MOST, np.int32)
    ranked = sorted((one.order, slot) for slot, one in enumerate(slots) if one)
    rank_R[[slot for _, slot in ranked]] = np.arange(len(ranked))
    token_RT = np.zeros((len(slots), tokens), np.int32)
    if tokens > 1:
        for slot, request in enumerate(slots):
            if request is not None:
                token_RT[slot, : len(request.prompt_ids)] = request.prompt_ids

    def of(value: Callable[[Request], int], dtype: type = np.int32) -> np.ndarray:
        return np.array([value(one) if one else 1 for one in slots], dtype)

    return (
        marks(new, len(slots)),
        rank_R,
        of(lambda request: len(request.prompt_ids)),
        of(lambda request: request.params.max_tokens),
        of(lambda request: request.params.n),
        of(lambda request: request.salt, np.uint32),
        token_RT,
    )


def of_rows(
    rows: Sequences[Held | None],
    seated: dict[int, Held],
    end_ids: tuple[int, ...],
    vocabulary: int,
    *,
    penalises: bool,
) -> tuple[Any, ...]:
    """For ``dispatch.seat``: what the ``seated`` of all rows draw with."""
    idle = SamplingParams(temperature=0)
    drawing = [(held[0].params, held[1]) if held else (idle, 0) for held in rows]
    token_B = np.zeros(len(rows), np.int32)
    end_BX = np.full((len(rows), settings.ENDS), -1, np.int32)
    seen_BV = np.zeros((len(rows), vocabulary), bool) if penalises else None
    for row, (request, index) in seated.items():
        ends = settings.end_tokens(request.params, end_ids)
        end_BX[row, : len(ends)] = ends
        known = request.known(index)
        token_B[row] = known[-1]
        if seen_BV is not None:
            seen_BV[row, known] = True
    samplers = sampling.samplers(drawing, len(rows))
    return marks(list(seated), len(rows)), token_B, end_BX, samplers, seen_BV


def marks(places: list[int], count: int) -> np.ndarray:
    """Which of ``count`` places are named."""
    marked = np.zeros(count, bool)
    marked[places] = True
    return marked
