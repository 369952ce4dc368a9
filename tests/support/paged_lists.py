"""Block tables in plain Python: what the verbs of ``block_table`` must equal, block for block.

Written from the definitions alone, one row and one token at a time: a list of free blocks, a list
of blocks for each row, holders counted by looking through all lists. Tokens are numbers that are
never used twice, so that what a row reads back tells who wrote it.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.memory import block_table as tables

POISON = -1


class PagedLists:
    """Rows of blocks. A verb that does not fit returns None or False, and changes nothing."""

    def __init__(self, *, rows: int, blocks: int, block_size: int, blocks_per_row: int) -> None:
        self.size, self.most_blocks = block_size, blocks_per_row
        self.free = list(range(blocks))  # the longest free first
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.histories: list[list[int]] = [[] for _ in range(rows)]
        self.written = 0

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def lengths(self) -> list[int]:
        return list(map(len, self.histories))

    def reserve(self, tokens: list[int]) -> dict[int, tuple[int, int]] | None:
        """Writes the tokens. Returns the copies made, row -> (source, target)."""
        draft = copy.deepcopy(self)
        room = self.most_blocks * self.size
        if any(not 0 <= new <= room - old for new, old in zip(tokens, self.lengths(), strict=True)):
            return None
        copies: dict[int, tuple[int, int]] = {}
        for row, count in enumerate(tokens):
            for _ in range(count):
                if not draft._write(row, copies):
                    return None
        self.__dict__ = draft.__dict__
        return copies

    def _write(self, row: int, copies: dict[int, tuple[int, int]]) -> bool:
        table, history = self.tables[row], self.histories[row]
        begins = len(history) % self.size == 0
        if begins or self.holders(table[-1]) > 1:
            if not self.free:
                return False
            block = self.free.pop(0)
            if begins:
                table.append(block)
            else:
                copies[row] = table[-1], block
                table[-1] = block
        history.append(self.written)
        self.written += 1
        return True

    def fork(self, family: dict[int, tuple[int, int]]) -> bool:
        """Shares blocks, child -> (parent, tokens)."""
        lengths = self.lengths()
        for child, (parent, tokens) in family.items():
            stored = lengths[parent] if 0 <= parent < len(lengths) else 0
            if lengths[child] or not 0 < tokens <= stored:
                return False
        for child, (parent, tokens) in family.items():
            self.histories[child] = self.histories[parent][:tokens]
            self.tables[child] = self.tables[parent][: -(-tokens // self.size)]
        return True

    def release(self, rows: set[int]) -> bool:
        if not all(self.histories[row] for row in rows):
            return False
        for row in sorted(rows):
            table, self.tables[row], self.histories[row] = self.tables[row], [], []
            self.free += [block for block in reversed(table) if not self.holders(block)]
        return True

    def freed_by(self, rows: set[int]) -> int:
        """Blocks that nobody but these rows holds."""
        kept = {b for row, table in enumerate(self.tables) if row not in rows for b in table}
        return len({block for row in rows for block in self.tables[row]} - kept)


class Contents:
    """Tokens in the slots of a pool, written and read through the block tables under test."""

    def __init__(self, blocks: int, block_size: int) -> None:
        # The last is no block: what an empty cell names can be written, and reads as poison.
        self.token_NS = np.full((blocks + 1, block_size), POISON)

    def write(
        self,
        state: tables.BlockTable,
        copies: tables.Copies,
        stored: list[int],
        histories: list[list[int]],
    ) -> None:
        """Makes the copies, all at once, then writes what each row has beyond ``stored`` tokens."""
        size, table_BM = self.token_NS.shape[1], np.asarray(state.table_BM)
        self.token_NS[np.asarray(copies.target_C)] = self.token_NS[np.asarray(copies.source_C)]
        for row, history in enumerate(histories):
            for position in range(stored[row], len(history)):
                block = table_BM[row, position // size]
                self.token_NS[block, position % size] = history[position]

    def poison(self, state: tables.BlockTable) -> None:
        """What nobody holds can be read by nobody."""
        self.token_NS[:-1][np.asarray(state.pool.refcount_N) == 0] = POISON
        self.token_NS[-1] = POISON

    def read(self, state: tables.BlockTable) -> list[list[int]]:
        """The tokens of each row, through its table."""
        rows = zip(np.asarray(state.table_BM), np.asarray(state.length_B), strict=True)
        return [self.token_NS[table_M].ravel()[:length].tolist() for table_M, length in rows]


def counts(values: list[int]) -> jax.Array:
    return jnp.array(values, jnp.int32)


def same(one: Any, other: Any) -> bool:
    """Whether two pytrees are equal bit by bit."""
    equal = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), one, other)
    return all(jax.tree.leaves(equal))
