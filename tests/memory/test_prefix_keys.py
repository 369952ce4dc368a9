"""Keys of blocks against the definition in Python integers, and what the definition promises."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import prefix_keys
from tests.support.paged_lists import counts

WORD = 2**32
# The golden ratio's first 128 bits, and primes of xxHash32.
SEEDS = [0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834]
PLACES = [0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1]
SIZE = 4


@pytest.fixture(scope="module")
def keys():
    """``keys(salt, tokens)``: the keys of a sequence's blocks."""
    extend, root = jax.jit(prefix_keys.extend), jax.jit(prefix_keys.root)

    def chain(salt: int, tokens: list[int]) -> list[tuple[int, ...]]:
        key_A, found = root(np.uint32(salt)), []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            key_A = extend(key_A, counts(tokens[end - SIZE : end]))
            found.append(tuple(key_A.tolist()))
        return found

    return chain


def finalise(word: int) -> int:
    word ^= word >> 16
    word = word * 0x85EBCA6B % WORD
    word ^= word >> 13
    word = word * 0xC2B2AE35 % WORD
    return word ^ word >> 16


def quarter_round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    a = (a + b) % WORD
    d = rotate(d ^ a, 16)
    c = (c + d) % WORD
    b = rotate(b ^ c, 12)
    a = (a + b) % WORD
    d = rotate(d ^ a, 8)
    c = (c + d) % WORD
    b = rotate(b ^ c, 7)
    return a, b, c, d


def permute(key: list[int]) -> list[int]:
    a, b, c, d = key
    for _ in range(4):
        a, b, c, d = quarter_round(a, b, c, d)
    return [a, b, c, d]


def rotate(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) % WORD


def defined(salt: int, tokens: list[int]) -> list[tuple[int, ...]]:
    key = permute([(SEEDS[0] + salt) % WORD, *SEEDS[1:]])
    found = []
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        for lane in range(4):
            for place, token in enumerate(tokens[start : start + SIZE], 1):
                mixed = finalise((token + SEEDS[lane]) % WORD) ^ place * PLACES[lane] % WORD
                key[lane] = (key[lane] + finalise(mixed)) % WORD
        key = permute(key)
        found.append(tuple(key))
    return found


def test_the_definition_has_chachas_quarter_round():
    """The vector of RFC 8439, section 2.1.1."""
    given = 0x11111111, 0x01020304, 0x9B8D6F43, 0x01234567
    assert quarter_round(*given) == (0xEA2A92F4, 0xCB1CF8CE, 0x4581472E, 0x5881C4BB)


@pytest.mark.parametrize("salt", [0, 1, 2**32 - 1])
def test_keys_are_as_defined(keys, salt):
    """C1 to C3, and the same in every process: the definition holds no state."""
    tokens = [random.Random(salt).randrange(2**31) for _ in range(3 * SIZE + 1)]
    assert keys(salt, tokens) == defined(salt, tokens)
    assert len(keys(salt, tokens)) == 3


def test_a_bit_changes_about_half_of_its_key_and_of_all_later_ones(keys):
    rng = random.Random(0)
    flips = []
    for _ in range(64):
        tokens = [rng.randrange(50_000) for _ in range(2 * SIZE)]
        other = list(tokens)
        other[rng.randrange(SIZE)] ^= 1 << rng.randrange(17)
        for one, two in zip(keys(0, tokens), keys(0, other), strict=True):
            flips.append(sum((a ^ b).bit_count() for a, b in zip(one, two, strict=True)))
    assert 60 < np.mean(flips) < 68
    assert min(flips) > 32


def test_order_place_and_salt_count(keys):
    """C2, C6: the salt enters once and all later keys inherit it."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    same = keys(0, tokens)
    for other in (keys(0, [2, 1, *tokens[2:]]), keys(0, tokens[SIZE:] * 2), keys(1, tokens)):
        assert len({*same, *other}) == 4


def test_no_two_of_many_short_blocks_share_a_key(keys):
    tokens_ZS = np.stack(np.meshgrid(*[np.arange(9)] * SIZE), axis=-1).reshape(-1, SIZE)
    key_ZA = jax.vmap(lambda token_S: prefix_keys.extend(prefix_keys.root(0), token_S))(
        jnp.asarray(tokens_ZS, jnp.int32)
    )
    assert len({tuple(key_A) for key_A in key_ZA.tolist()}) == len(tokens_ZS)
    for word in range(prefix_keys.WORDS):  # 6561 values of 32 bits: 0.005 pairs are expected
        assert len(np.unique(key_ZA[:, word])) >= len(tokens_ZS) - 2
