"""What engine settings come to for a model, and what cannot be served under them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence as Sequences

import jax

from paged_jax.config import EngineConfig, ModelConfig
from paged_jax.decoding import caches
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import cache_groups
from paged_jax.memory.cache_groups import CacheGroups, Windows
from paged_jax.memory.layout import blocks_of
from paged_jax.model.weights import Loaded
from paged_jax.serving.requests import Params, as_samples

ENDS = 8  # end tokens a row has room for, without another compilation


def fit_config(config: EngineConfig, model: Loaded) -> EngineConfig:
    """The settings with what the model decides filled in."""
    kv_dtype = config.kv_dtype
    if kv_dtype == "auto":
        kv_dtype = {"float32": "f32", "bfloat16": "bf16"}[model.config.dtype]
    most = min(config.max_length, model.config.max_length)
    return dataclasses.replace(config, kv_dtype=kv_dtype, max_length=most)


def groups_of(model: ModelConfig, config: EngineConfig) -> CacheGroups:
    """The cache groups of a model under fitted settings.

    Rows in one piece, and blocks that are kept for hits, hold every token in all layers.
    """
    if config.cache == "dense" or config.prefix_caching:
        return cache_groups.whole(model.layers)
    return cache_groups.by_window(dataclasses.replace(model, max_length=config.max_length))


def create_cache(model: Loaded, config: EngineConfig) -> caches.Cache:
    """The cache that fitted settings describe, empty; ``ValueError`` where it has no room."""
    try:
        return _create_cache(
            dataclasses.replace(model.config, max_length=config.max_length), config
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        size = "rows, max_length" if config.cache == "dense" else "pool_slots"
        raise ValueError(f"{size}: no memory for such a cache: {error}") from None


@functools.partial(jax.jit, static_argnames=("shape", "config"))
def _create_cache(shape: ModelConfig, config: EngineConfig) -> caches.Cache:
    if config.cache == "dense":
        return caches.create_dense(shape, rows=config.rows, kv_dtype=config.kv_dtype)
    return caches.create_paged(
        shape,
        rows=config.rows,
        blocks=config.blocks,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        groups=groups_of(shape, config),
        caches_prefixes=config.prefix_caching,
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


def check_room(
    config: EngineConfig, windows: Windows, prompt: int, params: Params, samples: int
) -> None:
    """Raises ``ValueError`` for a request that rows, pool or a step could never take.

    ``windows``: of the cache groups. ``prompt``: tokens. ``samples``: sequences that an engine's
    request may have.
    """
    most, sequences = min(config.rows, samples), as_samples(params).n
    if sequences > most:
        name = "beam_width" if isinstance(params, BeamSearchParams) else "n"
        raise ValueError(
            f"{name}: expected at most {most} sequences, got {sequences}: there are {config.rows}"
            f" rows, and a request has up to {samples} samples"
        )
    need = most_blocks(config, windows, prompt, params.max_tokens, sequences)
    if config.cache == "paged" and need > config.blocks:
        raise ValueError(
            f"pool_slots: {prompt} prompt and {sequences} x {params.max_tokens} output tokens may"
            f" need {need} blocks of {config.block_size} slots, the pool has {config.blocks}"
        )
    # What was preempted is recomputed like a prompt, but for the token that was drawn last.
    known = prompt + params.max_tokens - 1
    if not config.chunked_prefill and known > config.step_tokens:
        raise ValueError(
            f"step_tokens: without chunked_prefill a step has to take {prompt} prompt and"
            f" {params.max_tokens} output tokens but one, {known}; it takes {config.step_tokens}"
        )


def most_blocks(
    config: EngineConfig, windows: Windows, prompt: int, output: int, sequences: int
) -> int:
    """Blocks that sequences of one prompt may come to hold, which share its full blocks.

    ``windows``: of the cache groups. ``prompt`` and ``output`` are tokens, the output's at most; in
    a dense cache a row is a block.
    """
    if config.cache == "dense":
        return sequences
    size = config.block_size
    shared = prompt // size
    kept = shared + sequences * (blocks_of(prompt + output - 1, size) - shared)
    return cache_groups.most_blocks(windows, kept, sequences, config.step_tokens, size, least=min)


def end_tokens(params: SamplingParams, end_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end a sequence of a request; ``ValueError`` where there are too many."""
    ends = (*params.stop_token_ids, *(() if params.ignore_eos else end_ids))
    if len(ends) > ENDS:
        raise ValueError(f"stop_token_ids: at most {ENDS} with the model's own, got {len(ends)}")
    return ends
