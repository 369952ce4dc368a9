"""What the benchmark times is what it says: steps that only decode, with an exact ledger."""

from __future__ import annotations

import functools

import jax
import numpy as np

from experiments import scheduler_cost
from paged_jax.memory import block_table

ROWS, BLOCKS, SIZE = 5, 103, 16


def test_every_step_decodes_and_the_ledger_is_exact() -> None:
    book, held = scheduler_cost.begin(ROWS, BLOCKS, SIZE, 18)
    count, book, held, ledger = jax.jit(functools.partial(scheduler_cost.steps, blocks=BLOCKS))(
        book, held
    )
    assert count == scheduler_cost.STEPS
    stored_B = 1 + np.arange(ROWS) + scheduler_cost.STEPS
    np.testing.assert_array_equal(held.table.length_B, stored_B)
    np.testing.assert_array_equal(book.drawn_RF[:ROWS, 0], 1 + scheduler_cost.STEPS)
    blocks = int((-(-stored_B // SIZE)).sum())
    assert ledger.token == stored_B.sum()
    assert ledger.token + ledger.reserved + ledger.internal == blocks * SIZE
    assert ledger.free == (BLOCKS - blocks) * SIZE
    assert block_table.faults(held.table) == []
