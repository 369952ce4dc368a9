"""Hit rates: three definitions, and the latest requests."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.memory import prefix_hits
from paged_jax.memory.prefix_hits import HitCounts, HitRates


def counts(*requests: tuple[int, int], block_size: int = 1) -> HitCounts:
    """Counts of (tokens, blocks found)."""
    total = prefix_hits.zero()
    for tokens, hits in requests:
        total = prefix_hits.add(total, jnp.int32(tokens), jnp.int32(hits), block_size)
    return total


def test_the_three_rates():
    rates = prefix_hits.rates(counts((10, 2), (33, 0), (4, 1), block_size=4))
    # Blocks: 3, 9 and 1, of which 2, 0 and 1 were found.
    expected = HitRates(blocks=3 / 13, tokens=12 / 47, requests=(8 / 10 + 0 + 4 / 4) / 3)
    assert rates is not None
    assert dataclasses.astuple(rates) == pytest.approx(dataclasses.astuple(expected))


def test_nothing_looked_up_is_not_nothing_found():
    assert prefix_hits.rates(prefix_hits.zero()) is None
    assert prefix_hits.rates() is None
    missed = prefix_hits.rates(counts((7, 0)))
    assert missed == HitRates(blocks=0.0, tokens=0.0, requests=0.0)


def test_the_latest_requests():
    """D15: 9 of 20; then 16 of 80 in four requests; then 2 of 10, which drops the first."""
    recent = prefix_hits.Recent(5)
    assert recent.rates() is None
    found = []
    for portion in (counts((20, 9)), counts(*[(20, 4)] * 4), counts((10, 2))):
        recent.add(portion)
        rates = recent.rates()
        assert rates is not None
        found.append(rates.tokens)
    assert found == pytest.approx([0.45, 0.25, 0.2])


def test_a_portion_of_more_requests_than_are_kept_counts_alone():
    recent = prefix_hits.Recent(1)
    recent.add(counts((10, 0)))
    recent.add(counts((10, 5), (10, 10)))
    rates = recent.rates()
    assert rates is not None
    assert rates.tokens == pytest.approx(0.75)


def test_recent_refuses():
    with pytest.raises(ValueError, match="most_requests: expected at least 1, got 0"):
        prefix_hits.Recent(0)


def test_counts_of_the_host_do_not_wrap():
    total = prefix_hits.host_zero()
    for _ in range(3):
        total = prefix_hits.add(total, np.int32(2**30), np.int32(2**25), 16)
    rates = prefix_hits.rates(total)
    assert total.tokens == 3 * 2**30
    assert rates == HitRates(blocks=0.5, tokens=0.5, requests=0.5)
