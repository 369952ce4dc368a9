"""How much of its prompts a prefix cache served: counts on the device, rates on the host.

Published hit rates differ in what they divide, so all three are kept, and named:

============  ==============================================================================
``blocks``    blocks found / blocks of the prompts, a partial last block counted as one
``tokens``    tokens found / tokens of the prompts
``requests``  mean over requests of its tokens found / its tokens
============  ==============================================================================

Count a request once, when it is admitted: not a look-up whose request then had to wait. Count one
that returns after a preemption apart, since it finds its own blocks.
"""

from __future__ import annotations

import collections
import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.memory.layout import blocks_of


class HitCounts(flax.struct.PyTreeNode):
    """Sums over looked-up requests. Below 2**31 tokens: read and begin anew before that."""

    requests: jax.Array  # i32
    blocks: jax.Array  # i32: of the prompts, partial ones included
    blocks_hit: jax.Array  # i32
    tokens: jax.Array  # i32: of the prompts
    tokens_hit: jax.Array  # i32
    shares: jax.Array  # f32: sum over requests of tokens found / tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HitRates:
    """The three rates of the module's table."""

    blocks: float
    tokens: float
    requests: float


def zero() -> HitCounts:
    """Nothing was looked up yet."""
    # One array each: a state that is donated may hold no buffer twice.
    return HitCounts(
        requests=jnp.int32(0),
        blocks=jnp.int32(0),
        blocks_hit=jnp.int32(0),
        tokens=jnp.int32(0),
        tokens_hit=jnp.int32(0),
        shares=jnp.float32(0),
    )


def host_zero() -> HitCounts:
    """Nothing was looked up yet, in NumPy's widest counts: for a server's life. Host."""
    whole, real = np.int64(0), np.float64(0)
    return HitCounts(whole, whole, whole, whole, whole, real)  # type: ignore[arg-type]


def add(
    counts: HitCounts, tokens: jax.Array | np.int32, hits: jax.Array | np.int32, block_size: int
) -> HitCounts:
    """One request more: ``tokens`` tokens, at least 1, of which ``hits`` full blocks were found."""
    found = hits * block_size
    return HitCounts(
        requests=counts.requests + 1,
        blocks=counts.blocks + blocks_of(tokens, block_size),
        blocks_hit=counts.blocks_hit + hits,
        tokens=counts.tokens + tokens,
        tokens_hit=counts.tokens_hit + found,
        shares=counts.shares + found.astype(jnp.float32) / tokens,
    )


def rates(*counts: HitCounts) -> HitRates | None:
    """The rates over all the counts together; None, not 0, while no request was looked up. Host."""
    totals = [sum(part) for part in zip(*map(_numbers, counts), strict=True)]
    if not totals or not totals[0]:
        return None
    requests, blocks, blocks_hit, tokens, tokens_hit, shares = totals
    return HitRates(
        blocks=blocks_hit / blocks, tokens=tokens_hit / tokens, requests=shares / requests
    )


class Recent:
    """Rates over the latest requests. Host.

    Counts come in portions (of a step, of a dispatch); the oldest portions are dropped while the
    others' requests alone pass ``most_requests``, and before them.
    """

    def __init__(self, most_requests: int) -> None:
        if most_requests < 1:
            raise ValueError(f"most_requests: expected at least 1, got {most_requests}")
        self._most_requests = most_requests
        self._portions: collections.deque[HitCounts] = collections.deque()
        self._requests = 0

    def add(self, portion: HitCounts) -> None:
        """Takes in a portion that begins where the one before ended."""
        self._portions.append(portion)
        self._requests += int(portion.requests)
        while self._requests > self._most_requests and len(self._portions) > 1:
            self._requests -= int(self._portions.popleft().requests)

    def rates(self) -> HitRates | None:
        """The rates of what is kept; None while nothing is."""
        return rates(*self._portions)


def _numbers(counts: HitCounts) -> list[float]:
    return [leaf.item() for leaf in jax.tree.leaves(counts)]
