"""Keys of full blocks: 128 bits that stand for a block's tokens and everything before them.

    key of block k = permute(key of block k - 1 + digest(tokens of block k)),

with ``root(salt)`` before block 0. ``permute`` is one to one on 128 bits, so equal tokens under
different salts never have equal keys. ``digest`` adds up one number a token, mixed from the token
and its place, apart for each of the four words: no loop over tokens. A pure function of its
arguments, the same in every process. Not cryptographic: a hit compares tokens and salt as well
(``prefix_cache``).

Sources of the mixing: MurmurHash3's 32-bit finaliser (Appleby) for a token, the quarter-round of
ChaCha (RFC 8439, section 2.1) for the permutation. Cost: O(block size) a block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WORDS = 4
ROUNDS = 4  # quarter-rounds of a permutation; one already joins every word to every other
_SEED_A = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)  # the golden ratio's first 128 bits
_PLACE_A = (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)  # primes of xxHash32 (Collet)


def root(salt: jax.Array | int) -> jax.Array:
    """The key before the first block of a tenant's sequences, u32 [4]; one for each 32-bit salt."""
    seed_A = jnp.array(_SEED_A, jnp.uint32)
    return _permute(seed_A.at[0].add(jnp.asarray(salt, jnp.uint32)))


def extend(key_A: jax.Array, token_S: jax.Array) -> jax.Array:
    """The key of the block that holds ``token_S`` and follows the block of ``key_A``."""
    place_S = jnp.arange(1, token_S.shape[0] + 1, dtype=jnp.uint32)
    place_SA = place_S[:, None] * jnp.array(_PLACE_A, jnp.uint32)
    token_SA = token_S.astype(jnp.uint32)[:, None] + jnp.array(_SEED_A, jnp.uint32)
    digest_A = _finalise(_finalise(token_SA) ^ place_SA).sum(axis=0, dtype=jnp.uint32)
    return _permute(key_A + digest_A)


def _finalise(word: jax.Array) -> jax.Array:
    """Every bit of a 32-bit word spread over all of it, one to one."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _permute(key_A: jax.Array) -> jax.Array:
    a, b, c, d = (key_A[word] for word in range(WORDS))
    for _ in range(ROUNDS):
        for left, right in ((16, 12), (8, 7)):
            a += b
            d = _rotate(d ^ a, left)
            c += d
            b = _rotate(b ^ c, right)
    return jnp.stack([a, b, c, d])


def _rotate(word: jax.Array, bits: int) -> jax.Array:
    return (word << bits) | (word >> (32 - bits))
