"""Prefix ids: what earlier requests share with a prompt, at any block size.

An id stands for ``ids_tokens`` tokens and everything before them, so a prompt's seen ids come
first, and "the longest common prefix" is its last seen id. Everything here is a sort of all ids:
O(T log T) for T ids, no loop over requests.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paged_jax.workload import ragged
from paged_jax.workload.trace import Trace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """What a cache that never evicts finds of all prompts, under three definitions."""

    blocks: float  # blocks found / blocks
    tokens: float  # tokens found / tokens
    requests: float  # mean over requests of its tokens found / its tokens


def split(
    ids: ragged.Ragged, prompt_R: np.ndarray, ids_tokens: int, block_size: int
) -> ragged.Ragged:
    """Ids for blocks of ``block_size`` tokens, equal where the blocks are known to be equal.

    Row r gets ceil(prompt / block_size) ids. A block is named by the last id that it touches and
    its place in it, as that id covers everything before: several blocks inside one id differ only
    in place, and a block that reaches over several ids is shared when all of them are. Returns
    fresh ids from 0, with the covering property kept.
    """
    _demand_blocks(ids_tokens, block_size)
    count_R = -(-prompt_R // block_size)
    offset_P = np.append(0, count_R.cumsum())
    place_T = np.arange(offset_P[-1]) - np.repeat(offset_P[:-1], count_R)
    end_T = np.minimum((place_T + 1) * block_size, np.repeat(prompt_R, count_R))
    touched_T = (end_T - 1) // ids_tokens + np.repeat(ids.offset_P[:-1], count_R)
    _, dense_T = np.unique(ids.values_T, return_inverse=True)  # so that the product cannot overflow
    # At most this many blocks end in one id: consecutive places, so they differ modulo it.
    width = ids_tokens // block_size + 2
    _, fresh_T = np.unique(dense_T[touched_T] * width + place_T % width, return_inverse=True)
    return ragged.Ragged(fresh_T, offset_P)


def from_tokens(trace: Trace, ids_tokens: int) -> Trace:
    """The trace with prefix ids of its prompts' token ids, one for ``ids_tokens`` tokens.

    Exact: an id is the number of a distinct (id before, tokens) pair, not a hash. ``ValueError``
    without token ids.
    """
    _demand_blocks(ids_tokens, ids_tokens)
    if trace.prompt_ids is None:
        raise ValueError(f"trace: expected token ids, which the format {trace.format} lacks")
    known: dict[tuple[int, bytes], int] = {}
    rows: list[list[int]] = []
    for index in range(trace.count):
        prompt_T = trace.prompt_ids.row(index)
        before, ids = -1, []
        for start in range(0, len(prompt_T), ids_tokens):
            link = before, prompt_T[start : start + ids_tokens].tobytes()
            before = known.setdefault(link, len(known))
            ids.append(before)
        rows.append(ids)
    return dataclasses.replace(trace, ids=ragged.pack(rows), ids_tokens=ids_tokens)


def infinite_cache(trace: Trace, block_size: int | None = None) -> Hits:
    """Shares of prompts that earlier requests had; the first unseen block ends a hit.

    In blocks of the ids' own size, or split to ``block_size``. The last block of a prompt is
    partial; it counts as one block, and as the tokens it holds. ``ValueError`` without ids.
    """
    ids, ids_tokens = _prefix_ids(trace)
    if block_size is not None:
        ids, ids_tokens = split(ids, trace.prompt_R, ids_tokens, block_size), block_size
    found_R = _seen(ids)[1]
    tokens_R = np.minimum(found_R * ids_tokens, trace.prompt_R)
    return Hits(
        blocks=float(found_R.sum() / ids.count_R.sum()),
        tokens=float(tokens_R.sum() / trace.prompt_R.sum()),
        requests=float((tokens_R / trace.prompt_R).mean()),
    )


def donors(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """For each request its donor, and the tokens they share: ``donor_R``, ``shared_R``.

    The donor is the most recent of the earlier requests with the longest common prefix; R, the
    number of requests, and 0 tokens where nobody shares. ``ValueError`` without ids.
    """
    ids, ids_tokens = _prefix_ids(trace)
    count = trace.count
    before_T, found_R = _seen(ids)
    has_R = found_R > 0
    last_R = np.where(has_R, ids.offset_P[:-1] + found_R - 1, 0)
    donor_R = np.where(has_R, ids.row_T[before_T[last_R]], count)
    shared_R = np.minimum(found_R * ids_tokens, trace.prompt_R)
    shared_R = np.minimum(shared_R, np.append(trace.prompt_R, 0)[donor_R])
    return donor_R, shared_R


def _seen(ids: ragged.Ragged) -> tuple[np.ndarray, np.ndarray]:
    """Where each id occurred last before (T, itself if nowhere), and seen ids a row (R)."""
    order_T = np.argsort(ids.values_T, kind="stable")
    before_T = np.arange(len(order_T))
    again_T = np.diff(ids.values_T[order_T], prepend=-1) == 0
    before_T[order_T[again_T]] = order_T[np.flatnonzero(again_T) - 1]
    seen_T = before_T < np.arange(len(order_T))
    return before_T, np.bincount(ids.row_T[seen_T], minlength=len(ids.count_R))


def _prefix_ids(trace: Trace) -> tuple[ragged.Ragged, int]:
    if trace.ids is None or trace.ids_tokens is None:
        raise ValueError(f"trace: expected prefix ids, which the format {trace.format} lacks")
    return trace.ids, trace.ids_tokens


def _demand_blocks(ids_tokens: int, block_size: int) -> None:
    if ids_tokens < 1 or block_size < 1:
        raise ValueError(
            f"ids_tokens, block_size: expected at least 1, got {ids_tokens}, {block_size}"
        )
