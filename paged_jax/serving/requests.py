"""What a user asks for and gets back: requests, their sequences, and outputs."""

from __future__ import annotations

import dataclasses

from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams

Params = SamplingParams | BeamSearchParams


def as_samples(params: Params) -> SamplingParams:
    """How the rows of a request draw."""
    return params.samples() if isinstance(params, BeamSearchParams) else params


@dataclasses.dataclass(eq=False)
class Sequence:
    """One output of a request while it is generated, or a beam while it is searched."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)  # a beam's is one, of all
    finish_reason: str | None = None  # "stop", "length" or "abort" when it has ended
    text_length: int | None = None  # characters before the stop string that ended it

    def finish(self, reason: str, tokens: int) -> None:
        """Ends the sequence after its first ``tokens`` tokens."""
        self.finish_reason = reason
        del self.token_ids[tokens:], self.logprobs[tokens:]


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """A beam search that goes on."""

    params: BeamSearchParams
    # Outputs that have ended, by the tokens before, the beam that held them, and the last token.
    ended: dict[tuple[int, int, int], list[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and the sequences sampled from it, or the best that were found."""

    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams  # of a search: those of its beams as samples
    sequences: list[Sequence]  # one for each row; once a search has ended its outputs, best first
    search: Search | None = None
    priority: int = 0  # the lowest is served first
    salt: int = 0  # of its tenant: prefix hits stay among requests of one
    number: int = 0  # in the order of arrival
    looked_up: bool = False  # in the prefix cache, at an admission before
    swapped: bool = False  # it waits in host memory

    @property
    def order(self) -> tuple[int, int]:
        """What requests are served by."""
        return self.priority, self.number

    def known(self, index: int) -> list[int]:
        """The tokens of a sequence, prompt and drawn."""
        return self.prompt_ids + self.sequences[index].token_ids

    @property
    def begun(self) -> bool:
        """Whether a sequence has drawn, or ended before it did, or is kept in host memory."""
        return self.swapped or any(
            sequence.token_ids or sequence.finish_reason for sequence in self.sequences
        )

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finish_reason for sequence in self.sequences)


@dataclasses.dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished output."""

    token_ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    cumulative_logprob: float  # of the model's own distribution, natural log
    logprobs: tuple[float, ...] | None  # of each token, where they were asked for
    finish_reason: str  # "stop": an end token or a stop string; "length": max_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUse:
    """Cache memory of a run. ``slots``: mean over the run's dispatches, by ledger category."""

    pool_slots: int
    block_size: int
    slot_bytes: int  # of one token in the layers of a cache group, scales included
    slots: dict[str, float]
    entry_slots: float  # mean table entries * block size: what a cache without sharing would hold
    saved_slots: float  # mean (table entries - blocks in use) * block size
    copies: int  # blocks copied on write
    running: float  # mean sequences at once


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """What a request came to."""

    prompt: str | None
    prompt_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    memory: MemoryUse  # of the run that served it
