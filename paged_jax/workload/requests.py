"""Requests as arrays: what a workload hands to a scheduler.

One immutable record of R requests in the order of their arrival. Lengths are *true* lengths,
known to the simulator and hidden from every allocator but the oracles. A request may begin with
one of X common prefixes, which are stored once and pinned, or with tokens that an earlier
request, its donor, stores too; never both.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paged_jax.config import MOST
from pallas_kernels import dims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """R requests with F samples each; host arrays of int32.

    Raises ``ValueError`` naming the field and the first request that breaks a rule.
    """

    prompt_R: np.ndarray  # tokens of the prompt, a common prefix included, >= 1
    output_RF: np.ndarray  # tokens that each sample will generate, >= 1
    arrival_R: np.ndarray  # step from which the request may be admitted, never decreasing
    prefix_R: np.ndarray  # which common prefix it begins with, X when none
    prefix_tokens_X: np.ndarray  # tokens of each common prefix, >= 1
    donor_R: np.ndarray  # earlier request whose prompt begins alike, R when none
    shared_R: np.ndarray  # tokens it has in common with its donor, <= both prompts
    # 1 where a longest length cut it short; leave it out where none did.
    cut_R: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not len(self.cut_R):
            object.__setattr__(self, "cut_R", np.zeros(len(self.prompt_R), np.int32))
        names = [field.name for field in dataclasses.fields(self)]
        for name in names:
            object.__setattr__(self, name, _frozen_int32(name, getattr(self, name)))
        sizes = dims(**{name: getattr(self, name) for name in names})
        index_R = np.arange(sizes.R)
        has_donor_R = self.donor_R != sizes.R
        _demand("prompt_R", self.prompt_R >= 1, "at least 1 token")
        _demand("output_RF", (self.output_RF >= 1).all(axis=1), "at least 1 token a sample")
        total_R = self.prompt_R.astype(np.int64) + self.output_RF.max(axis=1, initial=0)
        _demand("output_RF", total_R < MOST, f"prompt and output below {MOST} tokens")
        _demand("arrival_R", np.diff(self.arrival_R, prepend=0) >= 0, "arrivals in order, from 0")
        _demand("prefix_tokens_X", self.prefix_tokens_X >= 1, "at least 1 token")
        _demand("prefix_R", (self.prefix_R >= 0) & (self.prefix_R <= sizes.X), "a prefix, or none")
        prefix_tokens_R = np.append(self.prefix_tokens_X, 0)[self.prefix_R]
        _demand("prefix_R", prefix_tokens_R < self.prompt_R, "a prefix shorter than its prompt")
        _demand(
            "donor_R",
            (self.donor_R >= 0) & ((self.donor_R < index_R) | ~has_donor_R),
            "an earlier request, or none",
        )
        _demand("donor_R", ~has_donor_R | (self.prefix_R == sizes.X), "no donor beside a prefix")
        donor_prompt_R = np.append(self.prompt_R, 0)[self.donor_R]
        shared_fits_R = (self.shared_R <= self.prompt_R) & (self.shared_R <= donor_prompt_R)
        _demand("shared_R", (self.shared_R >= 0) & shared_fits_R, "0, or tokens of both prompts")

    @property
    def count(self) -> int:
        """R, the number of requests."""
        return len(self.prompt_R)

    @property
    def samples(self) -> int:
        """F, the sequences sampled from each prompt."""
        return self.output_RF.shape[1]


def independent(
    prompt_R: np.ndarray, output_RF: np.ndarray, arrival_R: np.ndarray | None = None
) -> Requests:
    """Requests that share nothing. ``output_RF`` may be [R] for one sample each."""
    output_RF = np.asarray(output_RF)
    output_RF = output_RF[:, None] if output_RF.ndim == 1 else output_RF
    count = len(prompt_R)
    none_R = np.zeros(count, np.int32)
    return Requests(
        prompt_R=prompt_R,
        output_RF=output_RF,
        arrival_R=none_R if arrival_R is None else arrival_R,
        prefix_R=none_R,
        prefix_tokens_X=np.zeros(0, np.int32),
        donor_R=np.full(count, count, np.int32),
        shared_R=none_R,
    )


def _frozen_int32(field: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    whole = np.issubdtype(array.dtype, np.integer) or not array.size
    if not whole or (array.size and np.abs(array).max() > np.iinfo(np.int32).max):
        raise ValueError(
            f"{field}: expected whole numbers of int32, got {array.dtype} {array!r:.60}"
        )
    frozen = array.astype(np.int32)  # a copy, so that freezing it touches nobody else's array
    frozen.flags.writeable = False
    return frozen


def _demand(field: str, holds: np.ndarray, what: str) -> None:
    if not holds.all():
        raise ValueError(f"{field}: entry {int(np.argmin(holds))} breaks the rule: {what}")
