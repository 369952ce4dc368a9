"""``LLM``: prompts in, text out, in the words that users of serving libraries know.

llm = LLM("path/to/model", block_size=16)
for output in llm.generate(["Once upon a time"], SamplingParams(n=2, max_tokens=64)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from pathlib import Path
from typing import Any

from paged_jax.config import EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.model import tokenizers, weights
from paged_jax.serving.engine import Engine
from paged_jax.serving.requests import (
    CompletionOutput,
    MemoryUse,
    Params,
    Request,
    RequestOutput,
    Sequence,
    as_samples,
)

Prompt = str | Sequences[int]  # text, or token ids


class LLM:
    """A model and how it is served.

    ``model``: a path that ``weights.load`` knows, or what it returned. ``dtype``: float32 or
    bfloat16, default the file's. Other keywords are ``EngineConfig``'s: ``cache``, ``block_size``,
    ``pool_slots``, ``max_length``, ``rows``, ``kv_dtype``, ``backend``, ... Raises ``ValueError``,
    naming what is wrong, for files and settings that do not go.
    """

    def __init__(
        self, model: str | Path | weights.Loaded, *, dtype: str | None = None, **settings: Any
    ) -> None:
        names = [field.name for field in dataclasses.fields(EngineConfig)]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise ValueError(f"{unknown[0]}: no such setting, there are {', '.join(names)}")
        self.config = EngineConfig(**settings)
        if isinstance(model, weights.Loaded):
            self.model, self.tokenizer = model, None
        else:
            self.model, self.tokenizer = weights.load(model, dtype), tokenizers.load(model)

    def generate(
        self, prompts: Prompt | Sequences[Prompt], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Outputs of every prompt, in their order; ``params`` hold for each.

        Results depend on prompt, params and sequence number alone, not on what else runs. Raises
        ``ValueError`` before anything runs for a prompt that cannot be served.
        """
        return self._serve(prompts, params or SamplingParams())

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[str | RequestOutput]:
        """Pieces of the first output's text as they come, then the ``RequestOutput``."""
        if self.tokenizer is None:
            raise ValueError("prompt: the model has no tokenizer, text cannot be streamed")
        engine, (request,) = self._start([prompt], params or SamplingParams())
        sequence, told = request.sequences[0], 0
        # The beginning of a stop string is held back until it is known not to be one.
        held = max([len(stop) - 1 for stop in request.params.stop], default=0)
        for _ in self._advance(engine):
            text = self._text(sequence)
            settled = len(text)
            if not sequence.finish_reason:
                settled = len(text.rstrip("\N{REPLACEMENT CHARACTER}")) - held
            if settled > told:
                yield text[told:settled]
                told = settled
        yield self._output(request, engine.memory.settle())

    def beam_search(
        self, prompts: Prompt | Sequences[Prompt], params: BeamSearchParams | None = None
    ) -> list[RequestOutput]:
        """The best ``beam_width`` outputs of every prompt, best first. Errors as ``generate``."""
        return self._serve(prompts, params or BeamSearchParams())

    def _serve(self, prompts: Prompt | Sequences[Prompt], params: Params) -> list[RequestOutput]:
        engine, requests = self._start(prompts, params)
        for _ in self._advance(engine):
            pass
        memory = engine.memory.settle()
        return [self._output(request, memory) for request in requests]

    def _start(
        self, prompts: Prompt | Sequences[Prompt], params: Params
    ) -> tuple[Engine, list[Request]]:
        """An engine with a row for every sequence, as far as there are, and the requests in it."""
        given, samples = _listed(prompts), as_samples(params)
        if samples.stop and self.tokenizer is None:
            raise ValueError("stop: the model has no tokenizer, use stop_token_ids")
        rows = min(self.config.rows, 1 << (len(given) * samples.n - 1).bit_length())
        config = dataclasses.replace(self.config, rows=rows)
        engine = Engine(self.model, config, samples=samples.n)
        requests = [
            engine.add(self._encode(one), params, one if isinstance(one, str) else None)
            for one in given
        ]
        return engine, requests

    def _advance(self, engine: Engine) -> Iterator[None]:
        """Runs a dispatch at a time; sequences end at stop strings."""
        for moved in engine.run():
            for request in moved:
                if request.params.stop:
                    self._stop(engine, request)
            yield

    def _stop(self, engine: Engine, request: Request) -> None:
        """Ends sequences whose text holds a stop string, after the token that completes it."""
        stops = request.params.stop
        for sequence in request.sequences:
            text = self._text(sequence)
            if sequence.text_length is not None or not any(stop in text for stop in stops):
                continue
            for tokens in range(1, len(sequence.token_ids) + 1):
                text = self._text(sequence, tokens)
                found = [text.index(stop) for stop in stops if stop in text]
                if found:
                    sequence.text_length = min(found)
                    engine.stop(request, sequence, tokens)
                    break

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ValueError("prompt: the model has no tokenizer, give token ids")
        if not prompt.isascii() and any("\ud800" <= sign <= "\udfff" for sign in prompt):
            raise ValueError(f"prompt: it is not valid Unicode: {prompt[:80]!a}")
        return self.tokenizer.encode(prompt)

    def _text(self, sequence: Sequence, tokens: int | None = None) -> str:
        assert self.tokenizer is not None, "text needs a tokenizer"
        return self.tokenizer.decode(sequence.token_ids[:tokens])[: sequence.text_length]

    def _output(self, request: Request, memory: MemoryUse) -> RequestOutput:
        return RequestOutput(
            prompt=request.prompt,
            prompt_ids=tuple(request.prompt_ids),
            outputs=tuple(self._completion(request, one) for one in request.sequences),
            memory=memory,
        )

    def _completion(self, request: Request, sequence: Sequence) -> CompletionOutput:
        assert sequence.finish_reason is not None, "the run has ended"
        return CompletionOutput(
            token_ids=tuple(sequence.token_ids),
            text=None if self.tokenizer is None else self._text(sequence),
            cumulative_logprob=sum(sequence.logprobs),
            logprobs=tuple(sequence.logprobs) if request.params.logprobs else None,
            finish_reason=sequence.finish_reason,
        )


def _listed(prompts: Prompt | Sequences[Prompt]) -> list[Prompt]:
    """One prompt or several as a list; ``ValueError`` for none."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    listed: list[Any] = [prompts] if single else list(prompts)
    if not listed:
        raise ValueError("prompts: expected at least one")
    return listed
