"""Contiguous serving in plain Python: an independent definition of the Orca baselines."""

from __future__ import annotations

import math

from paged_jax.workload.requests import Requests
from tests.support.allocators import BuddyModel, FirstFitModel


def promise(kind: str, prompt: int, output: int, max_length: int) -> int:
    """Tokens reserved for a sequence: the paper's section 6.1 in floating-point logarithms."""
    if kind == "max":
        return max_length
    if kind == "pow2":
        return min(max_length, prompt + 2 ** math.ceil(math.log2(output)))
    return prompt + output


class ChunkServing:
    """Requests in chunks of one of the model allocators; ``step`` returns the record of a step."""

    def __init__(
        self, requests: Requests, kind: str, model: type, pool_slots: int, max_length: int
    ):
        self.requests, self.kind, self.max_length = requests, kind, max_length
        self.pool: BuddyModel | FirstFitModel = model(pool_slots)
        self.pool_slots, self.now, self.next = pool_slots, 0, 0
        self.live: list[dict] = []

    def chunk(self, promised: int) -> int:
        buddy = isinstance(self.pool, BuddyModel)
        return 2 ** math.ceil(math.log2(promised)) if buddy else promised

    def step(self) -> dict[str, int]:
        for row in self.live:
            row["stored"] += 1
        refusal = self.admit_all()
        record = self.record(refusal)
        for row in [row for row in self.live if row["stored"] == row["final"] - 1]:
            assert self.pool.release(row["address"])
            self.live.remove(row)
        self.now += 1
        return record

    def admit_all(self) -> str:
        """Why the queue's head was refused: short, stranded, or free where nobody waits."""
        requests = self.requests
        while self.next < requests.count and requests.arrival_R[self.next] <= self.now:
            prompt, need, taken = int(requests.prompt_R[self.next]), 0, []
            for output in map(int, requests.output_RF[self.next]):
                promised = promise(self.kind, prompt, output, self.max_length)
                need += self.chunk(promised)
                taken.append((promised, prompt + output))
            if need > self.pool.free_slots():
                return "short"
            rows = []
            for promised, final in taken:
                address = self.pool.allocate(promised)
                if address is None:
                    break
                rows.append(
                    {"address": address, "promised": promised, "final": final, "stored": prompt}
                )
            if len(rows) < len(taken):
                for row in rows:
                    self.pool.release(row["address"])
                return "stranded"
            self.live += rows
            self.next += 1
        return "free"

    def record(self, refusal: str) -> dict[str, int]:
        promised = sum(row["promised"] for row in self.live)
        free = self.pool.free_slots()
        return {
            "token": sum(row["stored"] for row in self.live),
            "reserved": sum(min(r["promised"], r["final"]) - r["stored"] for r in self.live),
            "internal": sum(max(0, row["promised"] - row["final"]) for row in self.live),
            "round_up": self.pool_slots - free - promised,
            "stranded": free * (refusal == "stranded"),
            "short": free * (refusal == "short"),
            "cached": 0,
            "free": free * (refusal == "free"),
            "rows": len(self.live),
        }
