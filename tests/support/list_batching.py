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

    def __init__(
        self, requests, *, blocks, size, rows, budget, chunked, watermark=0, host=0, swapped=1
    ):
        self.requests, self.size, self.rows = requests, size, rows
        self.budget, self.chunked, self.watermark = budget, chunked, watermark
        self.free = list(range(blocks))
        self.drawn = {
            (r, f): 0 for r, (_, _, outs) in enumerate(requests) for f in range(len(outs))
        }
        self.ended: set[tuple[int, int]] = set()
        self.running: dict[int, dict[int, Sample]] = {}
        self.host_free, self.swapped = list(range(host)), swapped
        self.away: dict[int, dict[int, Sample]] = {}  # in host memory, with blocks of its pool
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

    def wanted(self, request, sample, rows=None):
        """Tokens that a sample has yet to compute: the others wait for the first one's prompt."""
        rows = rows or self.running[request]
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

    def demand(self, granted, running=None, held=None):
        """Blocks that the grants take, by trying them all."""
        running, held, count = running or self.running, held or self.held(), 0
        for (request, f), tokens in granted.items():
            one = running[request][f]
            if tokens and one.stored % self.size and held[one.blocks[-1]] > 1:
                held[one.blocks[-1]] -= 1
                count += 1
            count += self.blocks_for(one.stored + tokens) - self.blocks_for(one.stored)
        return count

    def move(self, rows, free):
        """The same rows over another pool's blocks, shared as they are here."""
        places: dict[int, int] = {}
        moved = {}
        for f in sorted(rows):
            moved[f] = Sample()
            moved[f].stored = rows[f].stored
            for block in rows[f].blocks:
                if block not in places:
                    places[block] = free.pop(0)
                moved[f].blocks.append(places[block])
        return moved, len(places)

    def preempt(self, victim):
        """Empties a request's rows; how many blocks went to host memory."""
        rows, moved = self.running[victim], 0
        blocks = {block for one in rows.values() for block in one.blocks}
        if len(rows) >= self.swapped and 0 < len(blocks) <= len(self.host_free):
            self.away[victim], moved = self.move(rows, self.host_free)
        for one in rows.values():
            self.drop(one)
        del self.running[victim]
        return moved

    def come_back(self, request):
        """A request's rows leave host memory; how many blocks that moves."""
        rows = self.away.pop(request)
        self.running[request], moved = self.move(rows, self.free)
        self.host_free += {block for one in rows.values() for block in one.blocks}
        return moved

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
        granted, preempted, admitted, moved = self.grants(), [], [], 0
        while self.running and self.demand(granted) > len(self.free):
            victim = max(self.running)
            granted = {key: tokens for key, tokens in granted.items() if key[0] != victim}
            moved += self.preempt(victim)
            preempted.append(victim)
        gone = [request for request in preempted if request in self.away]
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
            left = self.budget - sum(granted.values())
            if head in self.away:
                gone.append(head)
                moved += self.come_back(head)
            else:
                self.running[head] = {f: Sample() for f in self.live(head)}
            for f, tokens in self.shares(head, self.running[head], left).items():
                granted[head, f] = tokens
                self.store(self.running[head][f], tokens, self.held())
        record = {
            "granted": {key: tokens for key, tokens in granted.items() if tokens},
            "admitted": admitted,
            "preempted": sorted(preempted),
            "short": short,
            "swapped": sorted(gone),
            "moved": moved,
            "host": {
                (r, f): one.stored
                for r, rows in self.away.items()
                for f, one in rows.items()
                if one.stored
            },
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
        head = waiting[0]
        live = self.live(head)
        if sum(map(len, self.running.values())) + len(live) > self.rows:
            return head, "rows"
        rows = self.away.get(head) or {f: Sample() for f in live}
        left = self.budget - sum(granted.values())
        if head in self.away and not granted:
            left = max(left, len(live))
        shares = self.shares(head, rows, left)
        if not 0 < sum(shares.values()) <= left:
            return head, "budget"
        promised = sum(self.missing(r, f) for r in self.running for f in self.running[r])
        wanted = {f: self.wanted(head, f, rows) for f in live}
        if head in self.away and all(wanted.values()):
            keep = Counter(block for one in rows.values() for block in one.blocks)
            each = {(head, f): tokens for f, tokens in wanted.items()}
            need = len(keep) + self.demand(each, {head: rows}, Counter(keep))
        else:
            need = self.need(head)
        reserve = self.watermark if self.running else 0
        return head, "short" if need + promised + reserve > len(self.free) else None

    def shares(self, request, rows, left):
        """Tokens that each sample of an admitted request computes of what the budget leaves."""
        wanted = {f: self.wanted(request, f, rows) for f in sorted(rows)}
        shares = {f: 1 for f, count in wanted.items() if count == 1}
        left -= len(shares)
        for f, count in wanted.items():
            if count > 1:
                shares[f] = min(count, max(left, 0))
                if not self.chunked and shares[f] < count:
                    shares[f] = 0
                left -= count
        return shares

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
