"""Rows of several cache groups in Python lists: what ``Rows`` must equal, block for block.

Written from the rules alone, one token at a time: a list of free blocks, a list of cells for each
row of each group, holders counted by looking through all of them. Which blocks a window leaves
behind is found by asking for every token of a block whether the next query sees it.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import numpy as np

from paged_jax.memory.rows import Rows

POISON = -1
GONE = -1  # a cell whose block was released


class GroupLists:
    """Rows over one pool, each with a table in every group; a released cell is ``GONE``."""

    def __init__(self, *, rows: int, blocks: int, size: int, windows: tuple[int | None, ...]):
        self.size, self.windows = size, windows
        self.free = list(range(blocks))  # the longest free first
        self.tables: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in windows]
        self.histories: list[list[int]] = [[] for _ in range(rows)]
        self.written = 0
        # Tokens by block and slot; the last block is none, what is read there is poison.
        self.token_NS = np.full((blocks + 1, size), POISON)

    def holders(self, block: int) -> int:
        return sum(table.count(block) for tables in self.tables for table in tables)

    def cells(self) -> list[tuple[int, int]]:
        return list(itertools.product(range(len(self.windows)), range(len(self.histories))))

    def reserve(self, tokens: list[int]) -> list[tuple[int, int]] | None:
        """Room for new tokens: the copies made, source and target; None where it does not fit."""
        draft = copy.deepcopy(self)
        copies: list[tuple[int, int]] = []
        for group, row in self.cells():
            table, stored = draft.tables[group][row], len(self.histories[row])
            for position in range(stored, stored + tokens[row]):
                begins = position % self.size == 0
                if not begins and draft.holders(table[-1]) == 1:
                    continue
                if not draft.free:
                    return None
                block = draft.free.pop(0)
                if not begins:
                    copies.append((table.pop(), block))
                table.append(block)
        for history, count in zip(draft.histories, tokens, strict=True):
            history += range(draft.written, draft.written + count)
            draft.written += count
        self.__dict__ = draft.__dict__
        return copies

    def fork(self, child: int, parent: int) -> None:
        self.histories[child] = list(self.histories[parent])
        for tables in self.tables:
            tables[child] = list(tables[parent])

    def release(self, rows: set[int]) -> None:
        for tables in self.tables:
            for row in sorted(rows):
                table, tables[row] = tables[row], []
                self.free += [b for b in reversed(table) if b != GONE and not self.holders(b)]
        for row in rows:
            self.histories[row] = []

    def reorder(self, parents: list[int]) -> None:
        before = self.tables
        self.histories = [list(self.histories[parent]) for parent in parents]
        self.tables = [[list(tables[parent]) for parent in parents] for tables in before]
        old = [b for tables in before for table in tables for b in reversed(table) if b != GONE]
        left = Counter(old)
        for block in old:
            left[block] -= 1
            if not left[block] and not self.holders(block):
                self.free.append(block)

    def slide(self) -> None:
        """The last block that a row loses goes first, then the one before it, in every row."""
        leaving = {}
        for group, row in self.cells():
            window, table = self.windows[group], self.tables[group][row]
            behind = [
                cell
                for cell, block in enumerate(table)
                if block != GONE and not any(self.visible(cell, row, window))
            ]
            leaving[group, row] = behind
        while any(leaving.values()):
            for (group, row), behind in leaving.items():
                if behind:
                    cell = behind.pop()
                    block, self.tables[group][row][cell] = self.tables[group][row][cell], GONE
                    if not self.holders(block):
                        self.free.append(block)

    def visible(self, cell: int, row: int, window: int | None) -> list[bool]:
        """Of a cell's positions, which the next query of a row sees or is still to write."""
        query = len(self.histories[row])
        positions = range(cell * self.size, (cell + 1) * self.size)
        return [window is None or position > query - window for position in positions]

    def ledger(self, final: list[int]) -> tuple[int, int, int]:
        """Slots with a token, slots to be filled, slots that nobody will fill."""
        filled: Counter[int] = Counter()
        ending: Counter[int] = Counter()
        for group, row in self.cells():
            for cell, block in enumerate(self.tables[group][row]):
                if block != GONE:
                    begin, stored = cell * self.size, len(self.histories[row])
                    filled[block] = max(filled[block], min(self.size, stored - begin))
                    ending[block] = max(ending[block], min(self.size, final[row] - begin))
        token, end = sum(filled.values()), sum(ending.values())
        return token, end - token, self.size * len(filled) - end

    def write(self, rows: Rows, copies: list[tuple[int, int]], stored: list[int]) -> None:
        """Makes copies, then writes tokens beyond ``stored`` through the tables under test."""
        for source, target in copies:
            self.token_NS[target] = self.token_NS[source]
        for tables in np.asarray(rows.tables):
            for table_M, history, begin in zip(tables, self.histories, stored, strict=True):
                for position in range(begin, len(history)):
                    block = table_M[position // self.size]
                    self.token_NS[block, position % self.size] = history[position]

    def poison(self, rows: Rows) -> None:
        """What nobody holds can be read by nobody."""
        self.token_NS[:-1][np.asarray(rows.table.pool.refcount_N) == 0] = POISON
        self.token_NS[-1] = POISON

    def misread(self, rows: Rows, stored: list[int]) -> list[tuple[int, int, int]]:
        """(group, row, position) where a query at ``stored`` or later misreads what it sees."""
        wrong = []
        for group, row in self.cells():
            window, table_M = self.windows[group], np.asarray(rows.tables[group])[row]
            for position, token in enumerate(self.histories[row]):
                seen = window is None or position > stored[row] - window
                block = table_M[position // self.size]
                if seen and self.token_NS[block, position % self.size] != token:
                    wrong.append((group, row, position))
        return wrong
