"""The prefix cache inside compiled steps: rows in a scan, donation, no copies of the pool."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
from jax import lax

from paged_jax.memory import block_table, prefix_cache

ROWS, CELLS, SIZE = 3, 6, 2


def step(state: tuple, tokens_BT: jax.Array) -> tuple:
    """Every row is admitted, registered, decoded by a token and, but for the last, released."""
    table, cache = state

    def begin(row: jax.Array, state: tuple) -> tuple:
        table, cache, found = state
        token_T, count = tokens_BT[row], tokens_BT.shape[1]
        table, cache, hits, fits = prefix_cache.admit(table, cache, row, token_T, count, 0)
        end = jnp.where(fits, count // SIZE, 0)
        cache, _ = prefix_cache.register(table, cache, row, token_T, 0, end, 0)
        return table, cache, found + hits

    table, cache, found = lax.fori_loop(0, ROWS, begin, (table, cache, jnp.int32(0)))
    decodes_B = (table.length_B > 0).astype(jnp.int32)
    table, cache, _, fits = prefix_cache.reserve(table, cache, decodes_B, most_tokens=1)
    leaves_B = (table.length_B > 0) & (jnp.arange(ROWS) < ROWS - 1)
    table, cache, valid = prefix_cache.release(table, cache, leaves_B)
    return (table, cache), (found, fits & valid)


def empty(blocks: int) -> tuple:
    table = block_table.create(rows=ROWS, blocks=blocks, block_size=SIZE, blocks_per_row=CELLS)
    return table, prefix_cache.create(blocks=blocks, block_size=SIZE)


def compile_steps(blocks: int):
    tokens_ZBT = jnp.arange(4 * ROWS * 6, dtype=jnp.int32).reshape(4, ROWS, 6) % (ROWS * 6)
    anew = functools.partial(step)  # traced again, so that a mutant of a module is seen
    run = jax.jit(lambda state: lax.scan(anew, state, tokens_ZBT), donate_argnums=0)
    return run.lower(empty(blocks)).compile()


def copies_of_the_pool(compiled) -> list[str]:
    """Copies of arrays of N or more in the bodies of the program's loops."""
    text = compiled.as_text()
    assert "s32[4099]" in text
    assert "u32[4099,4]" in text
    return re.findall(r"\w+\[\d{4,}(?:,\d+)*\]\S* copy\(.*", text[: text.index("\nENTRY")])


def test_steps_in_a_scan_find_what_earlier_steps_stored_and_never_copy_the_pool():
    compiled = compile_steps(4099)
    assert copies_of_the_pool(compiled) == []
    state = empty(4099)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    (table, cache), (found_Z, fits_Z) = compiled(state)
    # Six tokens, two blocks of them to be found; the last row stays and is not admitted again.
    assert found_Z.tolist() == [0, 4, 4, 4]
    assert fits_Z.all()
    assert prefix_cache.faults(table, cache) == []
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((table, cache))]
    assert after == before


def test_steps_without_fences_copy_the_pool(monkeypatch):
    monkeypatch.setattr(lax, "optimization_barrier", lambda operands: operands)
    assert copies_of_the_pool(compile_steps(4099)) != []
