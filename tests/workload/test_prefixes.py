"""Prefix ids against definitions that compare prompts token by token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paged_jax.workload import Trace, prefixes, ragged, read_trace

IDS_TOKENS = 6


def prompts(seed: int, count: int = 60) -> list[tuple[int, ...]]:
    """Random prompts that often begin like an earlier one, some equal, some cut in an id."""
    generator = np.random.default_rng(seed)
    made: list[tuple[int, ...]] = []
    for _ in range(count):
        base = made[generator.integers(len(made))] if made and generator.random() < 0.7 else ()
        kept = base[: generator.integers(len(base) + 1)]
        fresh = tuple(
            generator.integers(0, 10**6, generator.integers(0 if kept else 1, 20)).tolist()
        )
        made.append(kept + fresh)
    return made


def identified(made: list[tuple[int, ...]]) -> Trace:
    """A trace whose ids are, by definition, one for each distinct beginning of a prompt."""
    numbers: dict[tuple[int, ...], int] = {}
    rows = [
        [
            numbers.setdefault(prompt[: end + IDS_TOKENS], 900 - 3 * len(numbers))
            for end in range(0, len(prompt), IDS_TOKENS)
        ]
        for prompt in made
    ]
    prompt_R = np.array([len(prompt) for prompt in made])
    return Trace(
        format="made",
        prompt_R=prompt_R,
        output_R=np.ones_like(prompt_R),
        ids=ragged.pack(rows),
        ids_tokens=IDS_TOKENS,
    )


def known_equal(first: tuple[int, ...], second: tuple[int, ...], place: int, size: int) -> bool:
    """Whether block ``place`` of both is the same as far as their ids can tell."""
    ends = [min((place + 1) * size, len(prompt)) for prompt in (first, second)]
    touched = -(-ends[0] // IDS_TOKENS) * IDS_TOKENS  # to the end of the last id it touches
    return place * size < min(ends) and ends[0] == ends[1] and first[:touched] == second[:touched]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 40])
def test_split_against_brute_force(block_size: int) -> None:
    made = prompts(block_size)
    trace = identified(made)
    assert trace.ids is not None
    blocks = prefixes.split(trace.ids, trace.prompt_R, IDS_TOKENS, block_size)
    assert blocks.count_R.tolist() == [-(-len(prompt) // block_size) for prompt in made]
    owners: dict[int, tuple[int, tuple[int, ...]]] = {}
    for row, prompt in enumerate(made):
        for place, block in enumerate(blocks.row(row).tolist()):
            before = [
                other for other in made[:row] if known_equal(prompt, other, place, block_size)
            ]
            assert (block in owners) == bool(before)
            where, owner = owners.setdefault(block, (place, prompt))
            assert where == place
            assert known_equal(prompt, owner, place, block_size)


def test_split_to_the_same_size_keeps_the_partition() -> None:
    trace = identified(prompts(3))
    assert trace.ids is not None
    same = prefixes.split(trace.ids, trace.prompt_R, IDS_TOKENS, IDS_TOKENS)
    pairs = set(zip(same.values_T.tolist(), trace.ids.values_T.tolist(), strict=True))
    assert len(pairs) == len(set(same.values_T)) == len(set(trace.ids.values_T))


@pytest.mark.parametrize("seed", range(5))
def test_donors_against_all_pairs(seed: int) -> None:
    made = prompts(seed)
    trace = identified(made)
    donor_R, shared_R = prefixes.donors(trace)
    assert trace.ids is not None
    rows = [trace.ids.row(row).tolist() for row in range(len(made))]
    for row, ids in enumerate(rows):
        best, most = len(made), 0
        for other in range(row):
            depth = 0
            while depth < min(len(ids), len(rows[other])) and ids[depth] == rows[other][depth]:
                depth += 1
            if depth and depth >= most:
                best, most = other, depth
        assert donor_R[row] == best
        assert shared_R[row] == min(most * IDS_TOKENS, len(made[row]))
        if best < len(made):
            shared = shared_R[row]
            assert made[row][:shared] == made[best][:shared]


@pytest.mark.parametrize("block_size", [None, 2, 4])
def test_infinite_cache_against_a_set(block_size: int | None) -> None:
    made = prompts(7)
    size = block_size or IDS_TOKENS
    seen: set[int] = set()
    found, whole, tokens, shares = 0, 0, 0, []
    trace = identified(made)
    assert trace.ids is not None
    blocks = prefixes.split(trace.ids, trace.prompt_R, IDS_TOKENS, size)
    for row, prompt in enumerate(made):
        keys = blocks.row(row).tolist()
        depth = next((at for at, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys)
        found, whole = found + depth, whole + len(keys)
        tokens += min(depth * size, len(prompt))
        shares.append(min(depth * size, len(prompt)) / len(prompt))
    hits = prefixes.infinite_cache(trace, block_size)
    assert hits.blocks == pytest.approx(found / whole)
    assert hits.tokens == pytest.approx(tokens / trace.prompt_R.sum())
    assert hits.requests == pytest.approx(np.mean(shares))


def test_ids_from_tokens_find_the_same_beginnings() -> None:
    made = prompts(11)
    packed = ragged.pack(made)
    prompt_R = packed.count_R
    plain = Trace(format="made", prompt_R=prompt_R, output_R=prompt_R, prompt_ids=packed)
    trace = prefixes.from_tokens(plain, IDS_TOKENS)
    expected = identified(made)
    assert [array.tolist() for array in prefixes.donors(trace)] == [
        array.tolist() for array in prefixes.donors(expected)
    ]
    with pytest.raises(ValueError, match="expected prefix ids, which the format made lacks"):
        prefixes.donors(plain)
    with pytest.raises(ValueError, match="expected token ids"):
        prefixes.from_tokens(expected, 4)
    with pytest.raises(ValueError, match="block_size: expected at least 1"):
        prefixes.infinite_cache(trace, 0)


def test_mooncake_hits_are_those_published(shared_data: Callable[[str], Path]) -> None:
    trace = read_trace(str(shared_data("mooncake_fast25/conversation_trace.jsonl")))
    hits = prefixes.infinite_cache(trace)
    assert [round(share, 4) for share in (hits.blocks, hits.tokens, hits.requests)] == [
        0.3664,
        0.3736,
        0.4094,
    ]
    assert round(hits.tokens, 6) == 0.373624  # an independent simulator's
    donor_R, shared_R = prefixes.donors(trace)
    assert (donor_R[1:] < trace.count).all()  # all begin with one common block
    assert shared_R.sum() / trace.prompt_R.sum() == pytest.approx(hits.tokens)


def test_sharegpt_hits_are_those_published(shared_data: Callable[[str], Path]) -> None:
    trace = read_trace(str(shared_data("sharegpt_tokens/sharegpt-llama-3.1-8b-300-sps10.jsonl")))
    trace = prefixes.from_tokens(trace, 16)
    assert round(prefixes.infinite_cache(trace).blocks, 3) == 0.075
    assert (prefixes.donors(trace)[0] < trace.count).sum() == 32
