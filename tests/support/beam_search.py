"""Beam search by brute force: every step scores whole texts afresh, with a function for logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def search(
    logits_of: Callable[[list[int]], np.ndarray],
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    ends: Sequence[int],
    length_penalty: float,
    early_stopping: bool,
) -> list[tuple[float, list[int], str]]:
    """The best ``width`` outputs as (sum of log probabilities, tokens, reason), best first."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, float, list[int]]] = []
    for step in range(1, max_tokens + 1):
        candidates = []
        for total, tokens in beams:
            logits = logits_of([*prompt, *tokens]).astype(np.float64)
            logits -= logits.max()
            logprobs = logits - math.log(np.exp(logits).sum())
            candidates += [(total + logprobs[t], [*tokens, t]) for t in range(len(logprobs))]
        candidates.sort(key=lambda candidate: -candidate[0])
        for total, tokens in candidates[:width]:
            if tokens[-1] in ends:
                finished.append((total / step**length_penalty, total, tokens))
        finished = sorted(finished, key=lambda one: -one[0])[:width]
        beams = [one for one in candidates if one[1][-1] not in ends][:width]
        if len(finished) == width:
            longest = max_tokens if length_penalty > 0 else step + 1
            reachable = beams[0][0] / longest**length_penalty
            if early_stopping or finished[-1][0] >= reachable:
                beams = []
                break
    outputs = [(score, total, tokens, "stop") for score, total, tokens in finished]
    outputs += [
        (total / len(tokens) ** length_penalty, total, tokens, "length") for total, tokens in beams
    ]
    outputs.sort(key=lambda one: -one[0])
    return [(total, tokens, reason) for _, total, tokens, reason in outputs[:width]]
