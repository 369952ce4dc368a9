"""Sharing patterns: common prefixes before prompts, and several samples of one prompt.

A common prefix is prepended, as the few-shot examples of 80 and 341 tokens in Fig. 16 of the
PagedAttention paper (Kwon et al., SOSP 2023), so a prompt keeps the tokens of its own until the
longest length cuts it. The requests that begin with a prefix at one fraction do so at every
larger one: cells of a sweep differ by nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paged_jax.workload import lengths
from paged_jax.workload.requests import Requests


def with_prefixes(
    requests: Requests,
    fraction: float,
    prefix_tokens: Sequence[int],
    generator: np.random.Generator,
    max_length: int,
) -> Requests:
    """The requests, each with probability ``fraction`` behind a uniformly chosen common prefix.

    ``prefix_tokens`` are the lengths of the X prefixes in tokens. Prompts and outputs are cut to
    ``max_length`` by ``lengths.cut`` again. ``ValueError`` for requests that share already, a
    fraction outside 0 to 1, or a prefix that leaves no room for a prompt.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction: expected 0 to 1, got {fraction}")
    if fraction > 0 and not prefix_tokens:
        raise ValueError(f"prefix_tokens: expected a prefix for fraction {fraction}, got none")
    for tokens in prefix_tokens:
        if not 1 <= tokens <= max_length - 2:
            raise ValueError(f"prefix_tokens: expected 1 to {max_length - 2}, got {tokens}")
    if len(requests.prefix_tokens_X) or (requests.donor_R != requests.count).any():
        raise ValueError("requests: expected none that share, got common prefixes or donors")
    count, prefixes = requests.count, len(prefix_tokens)
    chance_R, choice_R = generator.random((count, 2)).T  # in [0, 1): exact at fractions 0 and 1
    prefix_R = np.where(chance_R < fraction, (choice_R * prefixes).astype(np.int64), prefixes)
    prompt_R = requests.prompt_R + np.array([*prefix_tokens, 0], np.int64)[prefix_R]
    prompt_R, output_RF, cut_R = lengths.cut(prompt_R, requests.output_RF, max_length)
    return dataclasses.replace(
        requests,
        prompt_R=prompt_R,
        output_RF=output_RF,
        prefix_R=prefix_R,
        prefix_tokens_X=np.array(prefix_tokens, np.int64),
        cut_R=requests.cut_R | cut_R,
    )


def with_samples(requests: Requests, samples: int) -> Requests:
    """The requests with F = ``samples`` sequences each, all of the request's one output length.

    Samples of lengths of their own are a matter of the law: ``law.draw(..., samples=F)``.
    """
    if samples < 1:
        raise ValueError(f"samples: expected at least 1, got {samples}")
    if requests.samples != 1:
        raise ValueError(f"requests: expected one sample each, got {requests.samples}")
    return dataclasses.replace(requests, output_RF=np.repeat(requests.output_RF, samples, axis=1))
