"""An engine: requests in, tokens out, a batch of rows on the device in between.

The host admits requests first come, first served, feeds prompts in chunks, and looks at the device
once a dispatch, of one prefill step or of many decode steps. A request is admitted when the blocks
it may come to need are free beside those promised to others, so nothing is ever preempted. Samples
of a request share its prompt's blocks and copy the partial last one when they write.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Sequences

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.config import EngineConfig
from paged_jax.decoding import caches, sampling, steps
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory.layout import blocks_of
from paged_jax.model.weights import Loaded
from paged_jax.serving.memory_log import MemoryLog
from paged_jax.serving.requests import Request, Sequence

_ENDS = 8  # end tokens a row has room for, without another compilation


class Engine:
    """Serves requests of one model. Raises ``ValueError`` for settings the model cannot have."""

    def __init__(self, model: Loaded, config: EngineConfig) -> None:
        self.config = fit_config(config, model)
        self._end_ids = model.end_ids
        self._vocabulary = model.config.vocabulary
        self._graphdef, self._weights = nnx.split(model.decoder)
        self._batch = steps.create(
            create_cache(model, self.config), rows=self.config.rows, ends=_ENDS
        )
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: list[Request] = []
        self._row: list[tuple[Request, int] | None] = [None] * self.config.rows
        self._promised = 0  # blocks that running requests hold or may come to need
        self._uses = sampling.Uses()
        self.memory = MemoryLog(self._batch.cache)

    def add(
        self, prompt_ids: Sequences[int], params: SamplingParams, prompt: str | None = None
    ) -> Request:
        """Queues a request. Raises ``ValueError`` for one that could never be served."""
        check_prompt(prompt_ids, params.max_tokens, self.config, self._vocabulary)
        if params.n > self.config.rows:
            raise ValueError(f"n: {params.n} sequences need as many rows, of {self.config.rows}")
        request = Request(prompt, list(prompt_ids), params, [Sequence() for _ in range(params.n)])
        need = self._need(request)
        if need > self.config.blocks:
            raise ValueError(
                f"pool_slots: {len(prompt_ids)} prompt and {params.n} x {params.max_tokens} output"
                f" tokens may need {need} blocks of {self.config.block_size} slots, the pool has"
                f" {self.config.blocks}"
            )
        if params.repetition_penalty != 1 or params.temperature > 0:
            self._uses = _joined(self._uses, sampling.Uses.of([params]))
        self._waiting.append(request)
        return request

    def run(self) -> Iterator[list[Request]]:
        """Serves all that was added, a dispatch at a time; yields the requests it moved on."""
        while self._waiting or self._running:
            self._admit()
            prefilling = [one for one in self._running if one.stored < len(one.prompt_ids)]
            drawn = self._prefill(prefilling) if prefilling else self._decode()
            yield self._collect(drawn)

    def abort(self) -> None:
        """Drops all requests and frees what they hold."""
        self._waiting.clear()
        self._retire([row for row, holder in enumerate(self._row) if holder])
        self._running.clear()

    def _need(self, request: Request) -> int:
        """Blocks that a request may come to hold."""
        tokens = len(request.prompt_ids), request.params.max_tokens
        return most_blocks(self.config, *tokens, len(request.sequences))

    def _admit(self) -> None:
        seated = []
        while self._waiting:
            request = self._waiting[0]
            free = [row for row, holder in enumerate(self._row) if holder is None]
            need = self._need(request)
            room = self._promised + need <= self.config.blocks
            if len(free) < len(request.sequences) or not room:
                break
            self._waiting.popleft()
            self._running.append(request)
            self._promised += need
            for index, (sequence, row) in enumerate(zip(request.sequences, free, strict=False)):
                sequence.row = row
                self._row[row] = (request, index)
                seated.append(row)
        if seated:
            self._seat(seated)

    def _seat(self, seated: list[int]) -> None:
        rows = self.config.rows
        idle = SamplingParams(temperature=0)
        holders = [(held[0].params, held[1]) if held else (idle, 0) for held in self._row]
        end_BX = np.full((rows, self._batch.end_BX.shape[1]), -1, np.int32)
        seen_BV = np.zeros((rows, self._vocabulary), bool) if self._uses.penalises else None
        for row in seated:
            held = self._row[row]
            assert held is not None, "a row is seated with a request"
            ends = end_tokens(held[0].params, self._end_ids)
            end_BX[row, : len(ends)] = ends
            if seen_BV is not None:
                seen_BV[row, held[0].prompt_ids] = True
        self._batch = steps.seat(
            self._batch,
            jnp.zeros(rows, bool).at[np.array(seated)].set(True),
            jnp.array([params.max_tokens for params, _ in holders], jnp.int32),
            jnp.asarray(end_BX),
            sampling.samplers(holders, rows),
            None if seen_BV is None else jnp.asarray(seen_BV),
        )

    def _prefill(self, requests: list[Request]) -> steps.Drawn:
        """One chunk of prompts, in order of rows as packed queries are."""
        budget, chunk_of = self.config.prefill_tokens, {}
        source_B = np.full(self.config.rows, self.config.rows, np.int32)
        for request in requests:
            first = request.sequences[0].row
            chunk = request.prompt_ids[request.stored : request.stored + budget]
            if not chunk:
                break
            chunk_of[first] = chunk
            budget -= len(chunk)
            request.stored += len(chunk)
            if request.stored == len(request.prompt_ids):
                source_B[[sequence.row for sequence in request.sequences]] = first
        token_T, start_P = pack(chunk_of, self.config.rows, self.config.prefill_tokens)
        self._batch, drawn = steps.prefill(
            self._graphdef,
            self._weights,
            self._batch,
            token_T,
            start_P,
            jnp.asarray(source_B),
            uses=self._uses,
        )
        return drawn

    def _decode(self) -> steps.Drawn:
        """Many steps: to the end of all rows, or of the first where others wait for its place."""
        left = [
            request.params.max_tokens - len(sequence.token_ids)
            for request in self._running
            for sequence in request.sequences
            if not sequence.finish_reason
        ]
        count = min(self.config.dispatch_steps, min(left) if self._waiting else max(left))
        self._batch, drawn = steps.decode(
            self._graphdef,
            self._weights,
            self._batch,
            count,
            most_steps=self.config.dispatch_steps,
            uses=self._uses,
        )
        return drawn

    def _collect(self, drawn: steps.Drawn) -> list[Request]:
        """Hands out what a dispatch drew and frees the rows of what has ended."""
        token_XB, logprob_XB, fits = jax.device_get((drawn.token_XB, drawn.logprob_XB, drawn.fits))
        assert fits, "admission promised the blocks"
        self.memory.record(self._batch.cache, self._row)
        ended, moved = [], []
        for row, held in enumerate(self._row):
            if held is None:
                continue
            request, index = held
            sequence = request.sequences[index]
            drew_X = token_XB[:, row] >= 0
            sequence.token_ids += token_XB[drew_X, row].tolist()
            sequence.logprobs += logprob_XB[drew_X, row].tolist()
            if drew_X.any() and request not in moved:
                moved.append(request)
            self._end(request, sequence)
            if sequence.finish_reason:
                ended.append(row)
        self._retire(ended)
        return moved

    def _end(self, request: Request, sequence: Sequence) -> None:
        """Marks a sequence that its last token ends."""
        ends = end_tokens(request.params, self._end_ids)
        if sequence.token_ids and sequence.token_ids[-1] in ends:
            sequence.finish_reason = "stop"
        elif len(sequence.token_ids) >= request.params.max_tokens:
            sequence.finish_reason = "length"

    def stop(self, sequence: Sequence, tokens: int) -> None:
        """Ends a sequence that runs after its first ``tokens`` tokens: a stop string was met."""
        sequence.finish("stop", tokens)
        if sequence.row >= 0:
            self._retire([sequence.row])

    def _retire(self, rows: list[int]) -> None:
        """Frees rows, and the promise of requests none of whose sequences runs any more."""
        if not rows:
            return
        for row in rows:
            held = self._row[row]
            assert held is not None, "a row that ends was held"
            request, index = held
            request.sequences[index].row = -1
            self._row[row] = None
            if all(sequence.row < 0 for sequence in request.sequences):
                self._promised -= self._need(request)
                self._running.remove(request)
        marked_B = jnp.zeros(self.config.rows, bool).at[np.array(rows)].set(True)
        self._batch = steps.retire(self._batch, marked_B)


def fit_config(config: EngineConfig, model: Loaded) -> EngineConfig:
    """The settings with what the model decides filled in."""
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = {"float32": "f32", "bfloat16": "bf16"}[model.config.dtype]
    most = min(config.max_length, model.config.max_length)
    return dataclasses.replace(config, kv_dtype=kv_dtype, max_length=most)


def create_cache(model: Loaded, config: EngineConfig) -> caches.Cache:
    """The cache that fitted settings describe, empty."""
    shape = dataclasses.replace(model.config, max_length=config.max_length)
    if config.cache == "dense":
        return caches.create_dense(shape, rows=config.rows, kv_dtype=config.kv_dtype)
    return caches.create_paged(
        shape,
        rows=config.rows,
        blocks=config.blocks,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        backend=config.backend,
        interpret=config.interpret,
    )


def check_prompt(
    prompt_ids: Sequences[int], max_tokens: int, config: EngineConfig, vocabulary: int
) -> None:
    """Raises ``ValueError`` for a prompt that cannot be served."""
    if not prompt_ids:
        raise ValueError("prompt: it has no tokens")
    wrong = [token for token in prompt_ids if not 0 <= token < vocabulary]
    if wrong:
        raise ValueError(f"prompt: token {wrong[0]} is not in the vocabulary of {vocabulary}")
    if len(prompt_ids) + max_tokens > config.max_length:
        raise ValueError(
            f"prompt: {len(prompt_ids)} tokens and {max_tokens} to come pass the context of"
            f" {config.max_length}"
        )


def most_blocks(config: EngineConfig, prompt: int, output: int, sequences: int) -> int:
    """Blocks that sequences of one prompt may come to hold, which share its full blocks.

    ``prompt`` and ``output`` are tokens, the output's at most; a dense cache takes no blocks.
    """
    if config.cache == "dense":
        return 0
    shared = prompt // config.block_size
    return shared + sequences * (blocks_of(prompt + output - 1, config.block_size) - shared)


def end_tokens(params: SamplingParams, end_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end a sequence of a request; ``ValueError`` where there are too many."""
    ends = (*params.stop_token_ids, *(() if params.ignore_eos else end_ids))
    if len(ends) > _ENDS:
        raise ValueError(f"stop_token_ids: at most {_ENDS} with the model's own, got {len(ends)}")
    return ends


def pack(tokens_of: dict[int, list[int]], rows: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Tokens of rows packed in the order of rows, padded, and the offsets that cut them.

    Few sizes are compiled: powers of two from 8, and ``most``.
    """
    count_B = [len(tokens_of.get(row, ())) for row in range(rows)]
    start_P = np.concatenate([[0], np.cumsum(count_B)]).astype(np.int32)
    total = int(start_P[-1])
    size = min(max(8, 1 << (total - 1).bit_length()), max(most, total))
    token_T = np.zeros(size, np.int32)
    token_T[:total] = [token for row in sorted(tokens_of) for token in tokens_of[row]]
    return jnp.asarray(token_T), jnp.asarray(start_P)


def _joined(one: sampling.Uses, other: sampling.Uses) -> sampling.Uses:
    return sampling.Uses(
        draws=one.draws or other.draws,
        truncates=one.truncates or other.truncates,
        penalises=one.penalises or other.penalises,
    )
