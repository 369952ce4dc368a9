"""Beam search over prompts: as many requests at a time as rows and blocks allow.

All requests of a wave begin in one step, the chunk that holds the last token of every prompt, and
the host looks at the device once in ``dispatch_steps`` steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from collections.abc import Sequence as Sequences

import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.config import EngineConfig
from paged_jax.decoding import beams as device
from paged_jax.decoding import steps
from paged_jax.decoding.beams import Beams, BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table
from paged_jax.memory.cache_groups import Windows
from paged_jax.model.weights import Loaded
from paged_jax.serving import dispatch, settings
from paged_jax.serving.device_reads import DeviceReads
from paged_jax.serving.memory_log import Held, MemoryLog
from paged_jax.serving.requests import Request, Sequence

Prompts = Sequences[list[int]]


def run(
    model: Loaded, config: EngineConfig, prompts: Prompts, params: BeamSearchParams
) -> tuple[list[Request], list[MemoryLog]]:
    """Searches every prompt. Returns requests with the best ``beam_width`` outputs, best first,
    and a memory log a wave.

    Raises ``ValueError`` before anything runs for a prompt or a width that cannot be served.
    """
    config = settings.fit_config(config, model)
    if params.beam_width > config.rows:
        raise ValueError(
            f"beam_width: {params.beam_width} beams need as many rows, of {config.rows}"
        )
    for prompt_ids in prompts:
        settings.check_prompt(prompt_ids, params.max_tokens, config, model.config.vocabulary)
    windows = settings.groups_of(model.config, config).windows
    waves = list(_waves(config, windows, prompts, params))
    served = [_search(model, config, wave, params) for wave in waves]
    return [request for requests, _ in served for request in requests], [log for _, log in served]


def _waves(
    config: EngineConfig, windows: Windows, prompts: Prompts, params: BeamSearchParams
) -> Iterator[list[list[int]]]:
    """Prompts in their order, cut where rows or blocks are used up."""
    wave: list[list[int]] = []
    promised = 0
    for prompt_ids in prompts:
        need = settings.most_blocks(
            config, windows, len(prompt_ids), params.max_tokens, params.beam_width
        )
        if need > config.blocks:
            raise ValueError(
                f"pool_slots: {len(prompt_ids)} prompt tokens and {params.beam_width} beams of"
                f" {params.max_tokens} may need {need} blocks, the pool has {config.blocks}"
            )
        crowded = (len(wave) + 1) * params.beam_width > config.rows
        if wave and (crowded or promised + need > config.blocks):
            yield wave
            wave, promised = [], 0
        wave.append(prompt_ids)
        promised += need
    yield wave


def _search(
    model: Loaded, config: EngineConfig, prompts: list[list[int]], params: BeamSearchParams
) -> tuple[list[Request], MemoryLog]:
    """One wave, all its requests together."""
    width = params.beam_width
    config = dataclasses.replace(config, rows=len(prompts) * width)
    ends = () if params.ignore_eos else model.end_ids
    graphdef, weights = nnx.split(model.decoder)
    cache = settings.create_cache(model, config)
    batch = steps.create(cache, rows=config.rows, ends=max(1, len(ends)))
    if ends:
        batch = batch.replace(end_BX=jnp.tile(jnp.array(ends, jnp.int32), (config.rows, 1)))
    beams = device.create(batch, params)
    requests = [_request(prompt_ids, params) for prompt_ids in prompts]
    held: Held = [(request, index) for request in requests for index in range(width)]
    log, reads = MemoryLog(cache), DeviceReads()
    for chunk, last in _chunks(prompts, width, config.step_tokens):
        beams = device.begin(graphdef, weights, beams, *chunk, params=params, last=last)
    live_B = _look(beams, held, log, reads)
    done = 1
    while done < params.max_tokens and live_B.any():
        beams, held = _retire(beams, held, live_B)
        done = min(done + config.dispatch_steps, params.max_tokens)
        beams = device.search(graphdef, weights, beams, jnp.int32(done), params=params)
        live_B = _look(beams, held, log, reads)
    found = reads(beams.replace(batch=beams.batch.replace(cache=None)))
    assert found.fits, "the wave was cut to what the pool holds"
    log.parent_XB = found.parent_XB[: int(found.steps)]
    for number, request in enumerate(requests):
        request.sequences = _hypotheses(found, number, params)
    return requests, log


def _look(beams: Beams, held: Held, log: MemoryLog, reads: DeviceReads) -> np.ndarray:
    """Logs this moment of the cache. Returns the rows that go on."""
    cache = beams.batch.cache
    tail_B = block_table.last_block(cache.table, cache.table.length_B > 0)
    parts = (cache.rows.length_B, tail_B, cache.table.pool.used, cache.copies, cache.rows.passed)
    (length_B, tail_B, used, copies, passed), live_B = reads((parts, beams.batch.live_B))
    log.append(length_B, tail_B, int(used), held, copies=int(copies), passed=int(passed or 0))
    return live_B


def _retire(beams: Beams, held: Held, live_B: np.ndarray) -> tuple[Beams, Held]:
    """Frees the rows of requests that are done while others go on."""
    going = [one if live else None for one, live in zip(held, live_B, strict=True)]
    if going == held:
        return beams, held
    return beams.replace(batch=steps.retire(beams.batch, jnp.asarray(~live_B))), going


def _request(prompt_ids: list[int], params: BeamSearchParams) -> Request:
    sampling = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens, temperature=0)
    sequences = [Sequence() for _ in range(params.beam_width)]
    return Request(None, prompt_ids, sampling, sequences)


def _chunks(
    prompts: Prompts, width: int, most: int
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray, np.ndarray], bool]]:
    """Arrays for ``device.begin``: up to ``most`` tokens each, then every prompt's last token."""
    rows = len(prompts) * width
    nobody = np.full(rows, rows, np.int32)
    piece: dict[int, list[int]] = {}
    for number, prompt_ids in enumerate(prompts):
        left = prompt_ids[:-1]
        while left:
            room = most - sum(map(len, piece.values()))
            piece[number * width], left = left[:room], left[room:]
            if len(left) or room == len(piece[number * width]):
                yield (*dispatch.pack(piece, rows, most), nobody), False
                piece = {}
    if piece:
        yield (*dispatch.pack(piece, rows, most), nobody), False
    last = {number * width: prompt_ids[-1:] for number, prompt_ids in enumerate(prompts)}
    first_B = np.arange(rows, dtype=np.int32) // width * width
    yield (*dispatch.pack(last, rows, max(most, len(last))), first_B), True


def _hypotheses(found: Beams, number: int, params: BeamSearchParams) -> list[Sequence]:
    """A request's best outputs, best first: finished ones, and open beams at the last step."""
    width = params.beam_width
    scored: list[tuple[float, Sequence]] = []
    for place in range(width):
        score = float(found.finished_score_RF[number, place])
        if score > -np.inf:
            step = int(found.finished_step_RF[number, place])
            row = int(found.finished_row_RF[number, place])
            tokens = [*_trace(found, step, row), int(found.finished_token_RF[number, place])]
            logprob = float(found.finished_sum_RF[number, place])
            scored.append((score, _sequence(tokens, logprob, "stop")))
    if found.open_R[number]:
        for row in range(number * width, (number + 1) * width):
            logprob = float(found.score_B[row])
            if logprob > -np.inf:
                tokens = _trace(found, int(found.steps), row)
                score = logprob / len(tokens) ** params.length_penalty
                scored.append((score, _sequence(tokens, logprob, "length")))
    scored.sort(key=lambda pair: -pair[0])
    return [sequence for _, sequence in scored[:width]]


def _sequence(token_ids: list[int], logprob: float, reason: str) -> Sequence:
    return Sequence(token_ids=token_ids, logprobs=[logprob], finish_reason=reason)


def _trace(found: Beams, steps_done: int, row: int) -> list[int]:
    """Tokens of what a row holds after some steps, from the last back to the first."""
    tokens = []
    for step in range(steps_done - 1, -1, -1):
        tokens.append(int(found.token_XB[step, row]))
        row = int(found.parent_XB[step, row])
    return tokens[::-1]
