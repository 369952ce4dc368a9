"""What requests found in the prefix cache when they were admitted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_jax.memory import prefix_hits
from paged_jax.scheduling.batching import Step
from paged_jax.serving.requests import Request


class AdmissionHits:
    """Counts of blocks and tokens looked up and found, ``prefix_hits.HitCounts`` in host numbers.

    Those of requests that come back after a preemption, which find what they stored themselves, are
    apart from those of ``new`` ones.
    """

    def __init__(self, block_size: int) -> None:
        self.new = self.resumed = prefix_hits.host_zero()
        self._block_size = block_size

    def count(self, step: Step, slots: Sequence[Request | None]) -> None:
        """Takes in the admissions of a step; requests that are swapped in look nothing up."""
        for slot in np.flatnonzero(step.admitted_R & ~step.swapped_R).tolist():
            request = slots[slot]
            assert request is not None, "it was admitted from this slot"
            tokens = np.int32(len(request.known(0)))
            found = np.int32(step.found_R[slot] // self._block_size)
            if request.looked_up:
                self.resumed = prefix_hits.add(self.resumed, tokens, found, self._block_size)
            else:
                self.new = prefix_hits.add(self.new, tokens, found, self._block_size)
            request.looked_up = True
