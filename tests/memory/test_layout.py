"""Layouts against the blocks themselves: every token written down, equal blocks counted once."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from paged_jax.memory import layout as layouts

FIELDS = ("base", "joint", "own", "need", "copies", "is_joint")
COUNTS = ("prompt", "generated", "live", "shared")
SIZES = (1, 2, 3, 4)


def cut(tokens: list, block_size: int) -> list[tuple]:
    """Tokens in blocks; a block is what it holds."""
    starts = range(0, len(tokens), block_size)
    return [tuple(tokens[start : start + block_size]) for start in starts]


def enumerate_layout(
    prompt: int, generated: int, live: int, shared: int, block_size: int
) -> tuple[int, ...]:
    """The fields of a layout, by listing the blocks of all samples."""
    words = [("prompt", position) for position in range(prompt)]
    stored = cut(words[:shared], block_size)
    base = [block for block in stored if len(block) == block_size]
    begun = cut(words, block_size)
    samples = [
        cut(words + [(sample, position) for position in range(generated)], block_size)
        for sample in range(live)
    ]
    in_common = [block for block in samples[0] if all(block in blocks for blocks in samples)]
    if live == 1:  # nobody to share with: all that is new counts as joint
        in_common = samples[0]
    joint = [block for block in in_common if block not in base]
    new = {block for blocks in samples for block in blocks} - set(base)
    copies = len(stored) - len(base)  # a partial block that was stored already stays as it is
    if prompt % block_size:  # one of the versions that the samples make of a block may stay in it
        copies += len({blocks[len(begun) - 1] for blocks in samples}) - 1
    waits = generated == 0 and live > 1 and len(begun[-1]) < block_size
    own = len(samples[0]) - len(base) - len(joint)
    return len(base), len(joint), own, len(new), copies, waits


def small_requests(block_size: int) -> list[tuple[int, int, int, int]]:
    """Every small request: a prefix is shorter than its prompt, a donor may hold full blocks."""
    return [
        (prompt, generated, live, shared)
        for prompt, generated, live in itertools.product(range(1, 10), range(6), range(1, 4))
        for shared in range(prompt + (prompt % block_size == 0))
    ]


def computed(block_size: int, wrong: str = "") -> list[tuple[int, ...]]:
    """The fields of every small request; the count named ``wrong`` is one too high."""
    counts = {
        name: np.array(count, np.int32) + (name == wrong)
        for name, count in zip(COUNTS, zip(*small_requests(block_size), strict=True), strict=True)
    }
    layout = jax.jit(layouts.lay_out)(**counts, block_size=block_size)
    return list(zip(*(getattr(layout, field).tolist() for field in FIELDS), strict=True))


def enumerated(block_size: int) -> list[tuple[int, ...]]:
    return [enumerate_layout(*counts, block_size) for counts in small_requests(block_size)]


@pytest.mark.parametrize("block_size", SIZES)
def test_every_small_request(block_size):
    assert computed(block_size) == enumerated(block_size)


@pytest.mark.parametrize("wrong", COUNTS)
def test_every_count_matters(wrong):
    assert computed(3, wrong) != enumerated(3)


def test_blocks_of():
    for block_size in SIZES:
        for tokens in range(20):
            blocks = len(cut([0] * tokens, block_size))
            assert layouts.blocks_of(np.int32(tokens), block_size) == blocks
