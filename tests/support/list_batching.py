"""Continuous batching with Python lists, one request and one token at a time.

Written from the rules alone: a free list, a list of block ids a sequence, reference counts by
looking through all lists. ``step`` does what an engine's step does and says all that it did.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class Sample:
    """A running sequence: its blocks and the tokens it has stored."""

    def __init__(self):
        self.blocks: list[Any] = []  # numbers
        self.stored = 0


class ListBatching:
    """Serves requests given as ``(arrival, prompt, [output of each sample])``."""

    def __init__(self, requests, *, blocks, size, rows, budget, chunked, watermark=0):
        self.requests, self.size, self.rows = requests, size, rows
        self.budget, self.chunked, self.watermark = budget, chunked, watermark
        self.free = list(range(blocks))
        self.drawn = {
            (r, f): 0 for r, (_, _, outs) in enumerate(requests) for f in range(len(outs))
        }
        self.ended: set[tuple[int, int]] = set()
        self.running: dict[int, dict[int, Sample]] = {}
        self.now = 0

    def live(self, request):
        return [f for f in range(len(self.requests[request][2])) if (request, f) not in self.ended]

    def known(self, request, sample):
        return self.requests[request][1] + self.drawn[request, sample]

    def held(self):
        return Counter(
            block for rows in self.running.values() for one in rows.values() for block in one.blocks
        )

    def blocks_for(self, tokens):
        return -(-tokens // self.size)

    def wanted(self, request, sample):
        """Tokens that a sample has yet to compute: the others wait for the first one's prompt."""
        rows = self.running[request]
        first = min(rows)
        waiting = [f for f in rows if f != first and not rows[f].stored]
        if sample in waiting:
            return 0
        goal = self.requests[request][1] if waiting else self.known(request, sample)
        return goal - rows[sample].stored

    def grants(self):
        wanted = {(r, f): self.wanted(r, f) for r in sorted(self.running) for f in self.running[r]}
        granted = {key: 1 for key, count in wanted.items() if count == 1}
        left, open_ = self.budget - len(granted), True
        for key, count in sorted(wanted.items()):
            if count > 1:
                granted[key] = min(count, max(left, 0)) if open_ else 0
                left -= count
                if not self.chunked and granted[key] < count:
                    granted[key] = 0
        return granted

    def demand(self, granted):
        """Blocks that the grants take, by trying them all."""
        held, count = self.held(), 0
        for (request, f), tokens in granted.items():
            one = self.running[request][f]
            if tokens and one.stored % self.size and held[one.blocks[-1]] > 1:
                held[one.blocks[-1]] -= 1
                count += 1
            count += self.blocks_for(one.stored + tokens) - self.blocks_for(one.stored)
        return count

    def store(self, one, tokens, held):
        if tokens and one.stored % self.size and held[one.blocks[-1]] > 1:
            held[one.blocks[-1]] -= 1
            one.blocks[-1] = self.free.pop(0)
        for _ in range(self.blocks_for(one.stored + tokens) - len(one.blocks)):
            one.blocks.append(self.free.pop(0))
        one.stored += tokens

    def drop(self, one):
        blocks, one.blocks, one.stored = one.blocks, [], 0
        held = self.held()
        self.free += [block for block in reversed(blocks) if not held[block]]

    def step(self):
        granted, preempted, admitted = self.grants(), [], []
        while self.running and self.demand(granted) > len(self.free):
            victim = max(self.running)
            for f in self.running[victim]:
                self.drop(self.running[victim][f])
                granted.pop((victim, f), None)
            del self.running[victim]
            preempted.append(victim)
        held = self.held()
        for (request, f), tokens in granted.items():
            self.store(self.running[request][f], tokens, held)
        short = bool(preempted)
        while not preempted:
            head, why = self.head(granted)
            short = why == "short"
            if why:
                break
            admitted.append(head)
            rows = {f: Sample() for f in self.live(head)}
            self.running[head] = rows
            first = min(rows)
            tokens = min(self.wanted(head, first), self.budget - sum(granted.values()))
            granted[head, first] = tokens
            self.store(rows[first], tokens, Counter())
        record = {
            "granted": {key: tokens for key, tokens in granted.items() if tokens},
            "admitted": admitted,
            "preempted": sorted(preempted),
            "short": short,
            "tables": {
                (r, f): list(one.blocks)
                for r, rows in self.running.items()
                for f, one in rows.items()
            },
        }
        record["drew"] = self.finish(granted)
        self.now += 1
        return record

    def head(self, granted):
        """The next request to admit, and why it has to wait."""
        waiting = [
            r
            for r, (arrival, _, _) in enumerate(self.requests)
            if arrival <= self.now and r not in self.running and self.live(r)
        ]
        if not waiting:
            return None, "idle"
        head, prompt = waiting[0], self.requests[waiting[0]][1]
        live = self.live(head)
        if sum(map(len, self.running.values())) + len(live) > self.rows:
            return head, "rows"
        goal = self.known(head, live[0]) if len(live) == 1 else prompt
        left = self.budget - sum(granted.values())
        if left <= 0 or (not self.chunked and goal > left):
            return head, "budget"
        promised = sum(self.missing(r, f) for r in self.running for f in self.running[r])
        need, reserve = self.need(head), self.watermark if self.running else 0
        return head, "short" if need + promised + reserve > len(self.free) else None

    def need(self, request):
        """Blocks that a waiting request takes."""
        prompt, live = self.requests[request][1], self.live(request)
        if not any(self.drawn[request, f] for f in live):
            return self.blocks_for(prompt)
        own = sum(self.blocks_for(self.known(request, f)) - prompt // self.size for f in live)
        return prompt // self.size + own

    def missing(self, request, f):
        """Blocks that a running sample has yet to take for what it knows."""
        prompt, rows = self.requests[request][1], self.running[request]
        known, one = self.known(request, f), rows[f]
        if f != min(rows) and not one.stored:
            return 0 if known == prompt else self.blocks_for(known) - prompt // self.size
        return self.blocks_for(known) - len(one.blocks)

    def finish(self, granted):
        drew = []
        for request in list(self.running):
            rows, prompt = self.running[request], self.requests[request][1]
            first = min(rows)
            done = [
                f
                for f in rows
                if granted.get((request, f)) and rows[f].stored == self.known(request, f)
            ]
            followers = [f for f in rows if f != first and not rows[f].stored]
            if rows[first].stored >= prompt:
                for f in followers:
                    rows[f].blocks, rows[f].stored = list(rows[first].blocks), rows[first].stored
                    if first in done and self.known(request, f) == prompt:
                        done.append(f)
            for f in done:
                self.drawn[request, f] += 1
            drew += [(request, f) for f in done]
        for request in list(self.running):
            for f in list(self.running[request]):
                if self.drawn[request, f] >= self.requests[request][2][f]:
                    self.drop(self.running[request].pop(f))
                    self.ended.add((request, f))
            if not self.running[request]:
                del self.running[request]
        return sorted(drew)
