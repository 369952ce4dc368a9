"""A prefix cache in plain Python: what ``prefix_cache`` must equal, block for block.

Written from the definitions alone. A keyed block is entered under what it stands for: the tenant
and every token up to its end. There are no hashes and no chains. Free and idle blocks are lists,
holders are counted by looking through all tables. A verb that does not fit returns None or False,
and changes nothing.
"""

from __future__ import annotations

import copy
import functools

import jax

from paged_jax.memory import block_table, prefix_cache
from paged_jax.memory import pool as pools
from tests.support.paged_lists import counts

# Sizes of the arrays that tests compile the verbs for, once for all.
ROWS, NONE, CELLS, SIZE = 3, 10, 10, 2
MOST = CELLS * SIZE + 2  # tokens of a call: more than a row takes

Content = tuple[int, tuple[int, ...]]  # tenant, tokens from the first on


class PrefixLists:
    """Rows of blocks over a pool that remembers."""

    def __init__(self, *, rows: int, blocks: int, block_size: int, blocks_per_row: int) -> None:
        self.size, self.most_tokens = block_size, blocks_per_row * block_size
        self.free = list(range(blocks))  # the longest free first
        self.idle: list[int] = []  # the longest idle first
        self.keyed: dict[int, Content] = {}  # in order of keying
        self.tables: list[list[int]] = [[] for _ in range(rows)]
        self.histories: list[list[int]] = [[] for _ in range(rows)]

    def holders(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def match(self, tokens: list[int], salt: int) -> list[int]:
        """The blocks of the longest hit; one token at least is left to compute."""
        hits: list[int] = []
        for end in range(self.size, len(tokens), self.size):
            wanted = salt, tuple(tokens[:end])
            equal = [block for block, content in self.keyed.items() if content == wanted]
            if not equal:
                break
            hits.append(equal[0])
        return hits

    def admit(self, row: int, tokens: list[int], salt: int) -> int | None:
        """Stores the tokens in an empty row. Returns how many blocks were found."""
        if self.histories[row] or not 0 < len(tokens) <= self.most_tokens:
            return None
        draft = copy.deepcopy(self)
        hits = draft.match(tokens, salt)
        draft.idle = [block for block in draft.idle if block not in hits]
        draft.tables[row] = list(hits)
        for _ in range(len(hits), -(-len(tokens) // self.size)):
            block = draft._take()
            if block is None:
                return None
            draft.tables[row].append(block)
        draft.histories[row] = list(tokens)
        self.__dict__ = draft.__dict__
        return len(hits)

    def reserve(self, new: list[list[int]]) -> bool:
        """Each row writes its new tokens, in order of rows."""
        if any(
            len(old) + len(more) > self.most_tokens
            for old, more in zip(self.histories, new, strict=True)
        ):
            return False
        draft = copy.deepcopy(self)
        for row, tokens in enumerate(new):
            for token in tokens:
                if not draft._write(row, token):
                    return False
        self.__dict__ = draft.__dict__
        return True

    def _write(self, row: int, token: int) -> bool:
        table, history = self.tables[row], self.histories[row]
        if len(history) % self.size == 0 or self.holders(table[-1]) > 1:
            block = self._take()
            if block is None:
                return False
            if len(history) % self.size == 0:
                table.append(block)
            else:
                table[-1] = block
        self.keyed.pop(table[-1], None)
        history.append(token)
        return True

    def _take(self) -> int | None:
        if not self.free:
            if not self.idle:
                return None
            block = self.idle.pop(0)
            del self.keyed[block]
            self.free.append(block)
        return self.free.pop(0)

    def register(self, row: int, end: int, salt: int) -> None:
        """The row's blocks before logical block ``end`` can be found."""
        for cell, block in enumerate(self.tables[row][:end]):
            content = salt, tuple(self.histories[row][: (cell + 1) * self.size])
            self.keyed.setdefault(block, content)

    def fork(self, child: int, parent: int, tokens: int) -> None:
        """An empty row shares the first tokens of another."""
        self.histories[child] = self.histories[parent][:tokens]
        self.tables[child] = self.tables[parent][: -(-tokens // self.size)]

    def release(self, rows: set[int]) -> bool:
        if not all(self.histories[row] for row in rows):
            return False
        for row in sorted(rows):
            table, self.tables[row], self.histories[row] = self.tables[row], [], []
            for block in reversed(table):
                if not self.holders(block):
                    (self.idle if block in self.keyed else self.free).append(block)
        return True

    def reset(self) -> bool:
        if any(self.tables):
            return False
        self.free += self.idle
        self.idle, self.keyed = [], {}
        return True


class Verbs:
    """The verbs as they stand in their modules now, mutants included."""

    def __init__(self) -> None:
        self.match = prefix_cache.match
        self.admit = prefix_cache.admit
        self.adopt = prefix_cache.adopt
        self.make_room = prefix_cache.make_room
        self.register = prefix_cache.register
        self.reserve = prefix_cache.reserve
        self.release = prefix_cache.release
        self.reorder = prefix_cache.reorder
        self.reset = prefix_cache.reset
        self.fork = block_table.fork


class CompiledVerbs(Verbs):
    """The verbs under jit."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__ = {name: jax.jit(verb) for name, verb in vars(self).items()}


@functools.cache
def compiled_verbs() -> Verbs:
    """Compiled once a process."""
    return CompiledVerbs()


def empty(blocks: int) -> tuple[block_table.BlockTable, prefix_cache.PrefixCache]:
    """An empty table over a pool of ``blocks`` blocks, at most ``NONE``, and its cache."""
    table = block_table.create(rows=ROWS, blocks=NONE, block_size=SIZE, blocks_per_row=CELLS)
    table = table.replace(pool=pools.create(blocks, NONE))
    return table, prefix_cache.create(blocks=NONE, block_size=SIZE)


def padded(tokens: list[int]) -> jax.Array:
    """Tokens of a call, and behind them what nobody may read."""
    return counts(tokens + [-99] * (MOST - len(tokens)))
