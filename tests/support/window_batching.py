"""Continuous batching over cache groups with Python lists: ``ListBatching`` with tables in groups.

A sample's blocks are (group, cell, block). At the end of a step it loses those whose last token no
query from then on sees; what a request is charged in a group with a window is what a step sees.
"""

from __future__ import annotations

from tests.support.list_batching import ListBatching


class WindowBatching(ListBatching):
    """Serves requests over groups of ``windows``, None where a layer sees all."""

    def __init__(self, requests, *, windows, **settings):
        super().__init__(requests, **settings)
        self.windows = windows

    def of_group(self, one, group):
        return [item for item in one.blocks if item[0] == group]

    def shared_tails(self, one, tokens, held):
        """Last blocks that a sample is about to write into and that others hold, too."""
        if not tokens or not one.stored % self.size:
            return []
        tails = [self.of_group(one, group)[-1] for group in range(len(self.windows))]
        return [tail for tail in tails if held[tail] > 1]

    def demand(self, granted, running=None, held=None):
        running, held, count = running or self.running, held or self.held(), 0
        for (request, f), tokens in granted.items():
            one = running[request][f]
            tails = self.shared_tails(one, tokens, held)
            held.subtract(tails)
            grown = self.blocks_for(one.stored + tokens) - self.blocks_for(one.stored)
            count += len(tails) + grown * len(self.windows)
        return count

    def store(self, one, tokens, held):
        for tail in self.shared_tails(one, tokens, held):
            held[tail] -= 1
            one.blocks[one.blocks.index(tail)] = (*tail[:2], self.free.pop(0))
        for group in range(len(self.windows)):
            for cell in range(self.blocks_for(one.stored), self.blocks_for(one.stored + tokens)):
                one.blocks.append((group, cell, self.free.pop(0)))
        one.stored += tokens

    def give(self, items):
        held = self.held()
        self.free += [item[2] for item in items if not held[item]]

    def drop(self, one):
        items, one.blocks, one.stored = one.blocks, [], 0
        self.give(items)

    def finish(self, granted):
        drew = super().finish(granted)
        for rows in self.running.values():
            for one in rows.values():
                behind = [
                    (group, cell, block)
                    for group, cell, block in one.blocks
                    if self.windows[group] is not None
                    and (cell + 1) * self.size - 1 <= one.stored - self.windows[group]
                ]
                one.blocks = [item for item in one.blocks if item not in behind]
                self.give(behind)
        return drew

    def charged(self, window, blocks, rows=1):
        """Of blocks that would all be kept, those that a window lets rows hold at a time."""
        if window is None:
            return blocks
        return min(blocks, rows * (self.blocks_for(window - 1 + self.budget) + 1))

    def need(self, request):
        kept, live = super().need(request), self.live(request)
        drawn = any(self.drawn[request, f] for f in live)
        return sum(self.charged(window, kept, len(live) if drawn else 1) for window in self.windows)

    def missing(self, request, f):
        prompt, rows = self.requests[request][1], self.running[request]
        known, one = self.known(request, f), rows[f]
        gap = self.blocks_for(known) - self.blocks_for(one.stored)
        if f != min(rows) and not one.stored:
            gap = 0 if known == prompt else self.blocks_for(known) - prompt // self.size
        total = 0
        for group, window in enumerate(self.windows):
            held = len(self.of_group(one, group))
            most = self.charged(window, 10**6) - held
            total += max(0, min(gap, most))
        return total

    def used(self):
        return len({item[2] for item in self.held()})
