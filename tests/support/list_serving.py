"""Serving with Python lists, one request and one token at a time: what the schedulers must equal.

Written from the definitions alone: a free list, a list of block ids for each sequence, reference
counts by looking through all lists, the ledger by looking at every block of the pool.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from paged_jax.workload.requests import Requests


class Sequence:
    """A running sample: its blocks, the tokens it has stored, and how many it will store."""

    def __init__(self, final: int):
        self.blocks: list[int] = []
        self.stored = 0
        self.final = final


class ListServing:
    """Paged serving of ``requests``; ``step`` returns everything a record holds."""

    def __init__(self, requests: Requests, *, pool_slots, block_size, watermark=0, max_rows=10**9):
        self.requests, self.size, self.pool_slots = requests, block_size, pool_slots
        self.watermark, self.max_rows = watermark, max_rows
        self.blocks = pool_slots // block_size
        self.free = list(range(self.blocks))
        self.generated = [0] * requests.count
        self.finished: set[int] = set()
        self.running: dict[int, dict[int, Sequence]] = {}  # request -> sample -> sequence
        self.since: dict[int, int] = {}
        self.preempted: list[int] = []
        self.preemptions = self.copies = self.now = 0
        self.prefixes = []
        for tokens in requests.prefix_tokens_X:
            prefix = Sequence(int(tokens))
            self.store(prefix, int(tokens))
            self.prefixes.append(prefix)

    def everybody(self):
        return self.prefixes + [s for row in self.running.values() for s in row.values()]

    def references(self) -> Counter:
        return Counter(block for sequence in self.everybody() for block in sequence.blocks)

    def blocks_to_write(self, sequence: Sequence, tokens: int) -> int:
        end = -(-(sequence.stored + tokens) // self.size)
        return end - len(sequence.blocks)

    def store(self, sequence: Sequence, tokens: int, holders: Counter | None = None) -> None:
        """Appends tokens; a partial last block that others hold is copied first."""
        if tokens and holders and sequence.stored % self.size and holders[sequence.blocks[-1]] > 1:
            holders[sequence.blocks[-1]] -= 1
            sequence.blocks[-1] = self.free.pop(0)
            self.copies += 1
        for _ in range(self.blocks_to_write(sequence, tokens)):
            sequence.blocks.append(self.free.pop(0))
        sequence.stored += tokens

    def drop(self, sequence: Sequence) -> None:
        blocks, sequence.blocks = sequence.blocks, []
        held = self.references()
        self.free += [block for block in reversed(blocks) if not held[block]]

    def demand(self) -> int:
        """Blocks this step's writes take, by trying them all on copies of the counts."""
        held, count = self.references(), 0
        for samples in self.running.values():
            for sequence in samples.values():
                last = sequence.blocks[-1]
                if sequence.stored % self.size == 0:
                    count += 1
                elif held[last] > 1:
                    held[last] -= 1
                    count += 1
        return count

    def live(self, request: int) -> list[int]:
        outputs = self.requests.output_RF[request]
        return [f for f, output in enumerate(outputs) if output > self.generated[request]]

    def admit(self, request: int) -> bool:
        """Builds the request in a dry run on a copy of the free list, and keeps it if it fits."""
        requests, size = self.requests, self.size
        live = self.live(request)
        saved, saved_copies = list(self.free), self.copies
        self.free += [-1] * 10**4  # room to overdraw in the dry run
        base: list[int] = []
        shared = 0
        if requests.prefix_R[request] < len(self.prefixes):
            prefix = self.prefixes[requests.prefix_R[request]]
            base, shared = list(prefix.blocks), prefix.stored
        donor = requests.donor_R[request]
        if donor in self.running and self.since[donor] < self.now and requests.shared_R[request]:
            full = requests.shared_R[request] // size
            first = next(iter(self.running[donor].values()))
            base, shared = first.blocks[:full], full * size
        prompt, again = int(requests.prompt_R[request]), self.generated[request]
        outputs = requests.output_RF[request]
        samples = {f: Sequence(prompt + int(outputs[f]) - 1) for f in live}
        parent = samples[live[0]]
        parent.blocks, parent.stored = list(base), shared
        held = self.references() + Counter(base)
        self.store(parent, prompt - shared, held)
        if again:
            for f in live[1:]:
                samples[f].blocks, samples[f].stored = list(parent.blocks), prompt
            held = self.references() + Counter(b for s in samples.values() for b in s.blocks)
            for sequence in samples.values():
                self.store(sequence, again, held)
        taken = len(saved) + 10**4 - len(self.free)
        reserve = self.watermark if self.running else 0
        if taken + reserve > len(saved):
            self.free, self.copies = saved, saved_copies
            return False
        self.free = self.free[: len(saved) - taken]
        self.running[request] = samples
        self.since[request] = self.now
        return True

    def step(self) -> dict:
        short = self.make_room()
        held = self.references()
        for samples in self.running.values():
            for sequence in samples.values():
                self.store(sequence, 1, held)
        if not short:
            short = self.admit_all()
        record = self.record(short)
        self.finish()
        self.now += 1
        return record

    def make_room(self) -> bool:
        """Preempts the youngest until the rest can write. Returns whether anybody was."""
        before = self.preemptions
        while self.running and self.demand() > len(self.free):
            victim = max(self.running)
            for sample in list(self.running[victim]):
                self.drop(self.running[victim].pop(sample))
            del self.running[victim]
            self.preempted.insert(0, victim)
            self.preemptions += 1
        return self.preemptions > before

    def admit_all(self) -> bool:
        """Admits from the head of the queue. Returns whether one was refused for want of blocks."""
        while (head := self.head()) is not None:
            rows = sum(map(len, self.running.values())) + len(self.live(head))
            if rows > self.max_rows:
                return False
            if not self.admit(head):
                return True
            if head in self.preempted:
                self.preempted.remove(head)
        return False

    def finish(self) -> None:
        for request in list(self.running):
            self.generated[request] += 1
            if self.generated[request] == 1:
                self.fork(self.running[request])
            for f in list(self.running[request]):
                if self.requests.output_RF[request][f] == self.generated[request]:
                    self.drop(self.running[request].pop(f))
            if not self.running[request]:
                del self.running[request]
                self.finished.add(request)

    def fork(self, samples: dict[int, Sequence]) -> None:
        """After its prompt was computed once, all samples share it."""
        parent = samples[0]
        for sequence in samples.values():
            sequence.blocks, sequence.stored = list(parent.blocks), parent.stored

    def head(self) -> int | None:
        if self.preempted:
            return self.preempted[0]
        seen = self.finished | set(self.running)
        for request in range(self.requests.count):
            if request not in seen:
                return request if self.requests.arrival_R[request] <= self.now else None
        return None

    def siblings(self, sequence: Sequence) -> list[Sequence]:
        """Those for whom the sequence holds a prompt that they are about to share, and itself."""
        for samples in self.running.values():
            if sequence in samples.values():
                return [s for s in samples.values() if s is sequence or not s.stored]
        return [sequence]

    def record(self, short: bool) -> dict:
        token = reserved = internal = 0
        filled: Counter = Counter()
        promised: Counter = Counter()
        for sequence in self.everybody():
            if not sequence.stored:
                continue
            final = max(s.final for s in self.siblings(sequence))
            for position, block in enumerate(sequence.blocks):
                start = position * self.size
                here = min(sequence.stored - start, self.size)
                filled[block] = max(filled[block], here)
                promised[block] = max(promised[block], min(final - start, self.size))
        for block, here in filled.items():
            token += here
            reserved += promised[block] - here
            internal += self.size - promised[block]
        unallocated = len(self.free) * self.size
        return {
            "token": token,
            "reserved": reserved,
            "internal": internal,
            "round_up": self.pool_slots - self.blocks * self.size,
            "stranded": 0,
            "short": unallocated if short else 0,
            "cached": 0,
            "free": 0 if short else unallocated,
            "rows": sum(map(len, self.running.values())),
            "requests": len(self.running),
            "entries": sum(len(s.blocks) for s in self.everybody()),
            "used": self.blocks - len(self.free),
            "preemptions": self.preemptions,
            "copies": self.copies,
            "tables": {
                request * self.requests.samples + f: list(sequence.blocks)
                for request, samples in self.running.items()
                for f, sequence in samples.items()
            },
        }


def random_requests(seed: int, count: int, *, samples=1, same=True, prefixes=(), donors=False):
    """Short requests with every kind of sharing asked for."""
    rng = np.random.default_rng(seed)
    prompt_R = rng.integers(1, 14, count)
    shape = (count, 1 if same else samples)
    output_RF = np.broadcast_to(rng.integers(1, 16, shape), (count, samples))
    prefix_R = np.full(count, len(prefixes))
    donor_R, shared_R = np.full(count, count), np.zeros(count, int)
    if prefixes:
        prefix_R = rng.integers(0, len(prefixes) + 1, count)
        prompt_R = prompt_R + np.append(prefixes, 0)[prefix_R]
    if donors:
        for request in range(1, count):
            if rng.random() < 0.6 and prefix_R[request] == len(prefixes):
                donor_R[request] = rng.integers(max(0, request - 4), request)
                shared_R[request] = rng.integers(
                    0, min(prompt_R[request], prompt_R[donor_R[request]]) + 1
                )
        shared_R[donor_R == count] = 0
    return Requests(
        prompt_R=prompt_R,
        output_RF=output_RF,
        arrival_R=np.sort(rng.integers(0, count, count)),
        prefix_R=prefix_R,
        prefix_tokens_X=np.asarray(prefixes, int),
        donor_R=donor_R,
        shared_R=shared_R,
    )
