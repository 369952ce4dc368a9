"""The host's side of beam search: what each beam holds, and what a search came to.

The device keeps scores and chooses; of a step it says which token became a beam and which row that
continues. The host follows, so that it knows a beam's tokens when a preemption has undone them, and
takes down the outputs that end.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from typing import Any

import jax
import numpy as np

from paged_jax.decoding.beams import Beams, Searches
from paged_jax.serving.requests import Request, Sequence


def describe(slots: Sequences[Request | None]) -> Searches:
    """How the requests in an engine's slots are searched."""
    params = [one.search.params if one and one.search else None for one in slots]
    penalty_R = np.array([one.length_penalty if one else 0 for one in params], np.float32)
    return Searches(
        searches_R=jax.device_put(np.array([one is not None for one in params])),
        penalty_R=jax.device_put(penalty_R),
        early_R=jax.device_put(np.array([bool(one and one.early_stopping) for one in params])),
    )


def follow(request: Request, row_of: dict[int, int], draw: Any, found: Beams, slot: int) -> None:
    """Beams take over what they continue, and the token that a step gave them.

    Args:
      request: a search that drew in this step.
      row_of: where each of its beams sits.
      draw: a ``dispatch.Draw`` of this step that the host has read.
      found: as the searches stood after the last step of the dispatch.
      slot: the request's.
    """
    assert request.search is not None, "it is searched"
    before = [beam.token_ids for beam in request.sequences]
    for ended in _ended(found, slot):
        steps, beam, token = ended
        if steps == len(before[0]):
            request.search.ended[ended] = [*before[beam], token]
    beam_of = {row: beam for beam, row in row_of.items()}
    for beam, sequence in enumerate(request.sequences):
        row = row_of[beam]
        sequence.token_ids = [*before[beam_of[draw.parent_B[row]]], int(draw.token_B[row])]
        sequence.logprobs = [float(draw.logprob_B[row])]


def conclude(request: Request, found: Beams, slot: int) -> bool:
    """Whether a search is over; if so, its best outputs are the request's sequences, best first:
    finished ones, and beams that were cut by ``max_tokens`` and may still have come before them.
    """
    assert request.search is not None, "it is searched"
    params, beams = request.search.params, request.sequences
    if found.open_R[slot] and len(beams[0].token_ids) < params.max_tokens:
        return False
    scored: list[tuple[float, Sequence]] = []
    scores_F, sums_F = found.finished_score_RF[slot], found.finished_sum_RF[slot]
    for place, ended in enumerate(_ended(found, slot)):
        output = Sequence(request.search.ended[ended], [float(sums_F[place])], "stop")
        scored.append((float(scores_F[place]), output))
    if found.open_R[slot]:
        for beam in beams:
            total = beam.logprobs[0]
            if total > -np.inf:
                score = total / len(beam.token_ids) ** params.length_penalty
                scored.append((score, Sequence(beam.token_ids, [total], "length")))
    scored.sort(key=lambda pair: -pair[0])
    request.sequences = [output for _, output in scored[: params.beam_width]]
    return True


def _ended(found: Beams, slot: int) -> Iterator[tuple[int, int, int]]:
    """What a search has finished, best first, as ``Search.ended`` names it."""
    for place in np.flatnonzero(found.finished_score_RF[slot] > -np.inf):
        yield (
            int(found.finished_step_RF[slot, place]),
            int(found.finished_beam_RF[slot, place]),
            int(found.finished_token_RF[slot, place]),
        )
