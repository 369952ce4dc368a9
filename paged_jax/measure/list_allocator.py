"""Paged serving in plain Python lists: what a simulation is checked and timed against.

A free list, a list of block ids for each running request, and the rules of the replay oracles:
grow or preempt the youngest, then admit first come, first served. One sequence a request, nothing
shared. Written for clarity and speed in Python alone; it imports nothing of this project.
Cost: O(running requests) a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class ListAllocator:
    """Requests given as (arrival step, prompt tokens, output tokens), in order of arrival."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int, int]],
        *,
        blocks: int,
        block_size: int,
        watermark_blocks: int = 0,
        max_rows: int = 2**30,
    ) -> None:
        self.requests, self.block_size = requests, block_size
        self.watermark_blocks, self.max_rows = watermark_blocks, max_rows
        self.blocks = blocks
        self.free = list(range(blocks))
        self.running: list[int] = []  # requests, the oldest first
        self.table: list[list[int]] = [[] for _ in requests]
        self.stored = [0] * len(requests)
        self.generated = [0] * len(requests)
        self.preempted: list[int] = []  # a stack: the front of the queue is its top
        self.arrived = 0  # requests that have left the tail of the queue
        self.preemptions = 0
        self.step = 0

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Rows running, blocks in use, tokens stored: once a step, after admission."""
        while self.running or self.preempted or self.arrived < len(self.requests):
            if not self.running and not self.preempted:
                self.step = max(self.step, self.requests[self.arrived][0])
            if not self._grow():
                self._admit()
            used = self.blocks - len(self.free)
            yield len(self.running), used, sum(self.stored[r] for r in self.running)
            self._finish()
            self.step += 1

    def _grow(self) -> bool:
        """Every running row stores a token. Returns whether anybody had to be preempted."""
        before, row = self.preemptions, 0
        while row < len(self.running):
            request = self.running[row]
            if self.stored[request] % self.block_size == 0:
                while not self.free and len(self.running) > row:
                    self._preempt(self.running.pop())
                if len(self.running) == row:
                    break
                self.table[request].append(self.free.pop())
            self.stored[request] += 1
            row += 1
        return self.preemptions > before

    def _preempt(self, request: int) -> None:
        self._release(request)
        self.preempted.append(request)
        self.preemptions += 1

    def _release(self, request: int) -> None:
        self.free.extend(reversed(self.table[request]))
        self.table[request] = []
        self.stored[request] = 0

    def _admit(self) -> None:
        while self.preempted or self.arrived < len(self.requests):
            request = self.preempted[-1] if self.preempted else self.arrived
            arrival, prompt, _ = self.requests[request]
            tokens = prompt + self.generated[request]
            need = -(-tokens // self.block_size)
            spare = self.watermark_blocks if self.running else 0
            full = len(self.running) >= self.max_rows
            if arrival > self.step or full or need + spare > len(self.free):
                return
            if self.preempted:
                self.preempted.pop()
            else:
                self.arrived += 1
            self.table[request] = [self.free.pop() for _ in range(need)]
            self.stored[request] = tokens
            self.running.append(request)

    def _finish(self) -> None:
        staying = []
        for request in self.running:
            self.generated[request] += 1
            if self.generated[request] == self.requests[request][2]:
                self._release(request)
            else:
                staying.append(request)
        self.running = staying
