"""Sources of requests: drawn from a seeded ``Workload``, or replayed from a trace.

The same workload and seed give the same bytes. Lengths, arrivals and sharing each have a child of
the seed of their own, so a cell of a sweep that changes one leaves the others as they were
(common random numbers), and the first k requests do not depend on the count.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from paged_jax.workload import arrivals, lengths, prefixes, requests, sharing
from paged_jax.workload.requests import Requests
from paged_jax.workload.trace import Trace

TOKEN_IDS_BLOCK = 16  # shared prefixes of token ids are multiples of this


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to draw requests from. ``draw`` raises ``ValueError`` for values that do not go."""

    law: lengths.Law
    max_length: int  # longest prompt plus output, in tokens; longer requests are cut, not dropped
    correlation: float = 0.0  # rank correlation of prompt and output lengths, -1 to 1
    arrivals: arrivals.Arrivals = dataclasses.field(default_factory=arrivals.Saturated)
    sharing: float = 0.0  # fraction of requests that begin with a common prefix
    prefix_tokens: tuple[int, ...] = ()  # length of each common prefix
    samples: int = 1  # sequences sampled from each prompt
    sample_lengths: Literal["same", "own"] = "same"  # one output length a request, or a sample


def draw(workload: Workload, seed: int, count: int) -> Requests:
    """``count`` requests; ``Requests.cut_R`` says which of them ``max_length`` cut short."""
    if count < 1:
        raise ValueError(f"count: expected at least 1 request, got {count}")
    if workload.sample_lengths not in ("same", "own"):
        raise ValueError(f"sample_lengths: expected same or own, got {workload.sample_lengths!r}")
    length_stream, arrival_stream, sharing_stream = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)
    )
    own = workload.sample_lengths == "own"
    prompt_R, output_RF = workload.law.draw(
        length_stream,
        count,
        correlation=workload.correlation,
        samples=workload.samples if own else 1,
    )
    prompt_R, output_RF, cut_R = lengths.cut(prompt_R, output_RF, workload.max_length)
    drawn = requests.independent(prompt_R, output_RF, workload.arrivals.draw(arrival_stream, count))
    drawn = dataclasses.replace(drawn, cut_R=cut_R)
    if not own:
        drawn = sharing.with_samples(drawn, workload.samples)
    return sharing.with_prefixes(
        drawn, workload.sharing, workload.prefix_tokens, sharing_stream, workload.max_length
    )


def replay(
    trace: Trace, *, step_seconds: float | None = None, max_length: int | None = None
) -> Requests:
    """The trace's requests in its own order, with its own arrivals and its own prefix sharing.

    Times in seconds need the length of a step; recorded steps are taken as they are; a trace
    without arrivals is saturated. Donors (see ``prefixes.donors``) come from prefix ids, where the
    trace has them, or from token ids, ``TOKEN_IDS_BLOCK`` at a time. ``max_length`` cuts as
    ``lengths.cut`` does. ``ValueError`` when ``step_seconds`` is missing, or given to a trace
    without times.
    """
    timed = trace.arrival_seconds_R is not None
    if timed != (step_seconds is not None):
        wanted = "the seconds a step takes" if timed else "none, as the trace has no times"
        raise ValueError(f"step_seconds: expected {wanted}, got {step_seconds}")
    prompt_R, output_RF = trace.prompt_R, trace.output_R[:, None]
    cut_R = np.zeros(trace.count, np.int32)
    if max_length is not None:
        prompt_R, output_RF, cut_R = lengths.cut(prompt_R, output_RF, max_length)
    arrival_R = trace.arrival_steps_R
    if trace.arrival_seconds_R is not None and step_seconds is not None:
        arrival_R = arrivals.in_steps(trace.arrival_seconds_R, step_seconds)
    replayed = requests.independent(prompt_R, output_RF, arrival_R)
    replayed = dataclasses.replace(replayed, cut_R=cut_R)
    if trace.prompt_ids is not None:
        trace = prefixes.from_tokens(trace, TOKEN_IDS_BLOCK)
    if trace.ids is None:
        return replayed
    donor_R, shared_R = prefixes.donors(trace)
    donor_prompt_R = np.append(prompt_R, 0)[donor_R]
    shared_R = np.minimum(shared_R, np.minimum(prompt_R, donor_prompt_R))
    return dataclasses.replace(replayed, donor_R=donor_R, shared_R=shared_R)
