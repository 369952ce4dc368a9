"""The decoder over both caches against float64, and against answers of other implementations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax.config import ModelConfig, RotaryConfig
from paged_jax.decoding import caches
from paged_jax.model import weights
from paged_jax.model.decoder import Decoder
from tests.support import decoder as definition
from tests.support.models import TINY, random_decoder

FAMILIES = (
    "gemma2_softcap",
    "llama3_rope_tied",
    "llama_gqa",
    "mistral_window",
    "qwen2_bias",
    "qwen3_qknorm",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "linear": {"rotary": RotaryConfig(theta=100.0, scaling="linear", factor=4.0)},
    "ntk": {"rotary": RotaryConfig(theta=100.0, scaling="ntk", factor=4.0)},
    "yarn": {"rotary": RotaryConfig(scaling="yarn", factor=4.0, original_length=64)},
    "yarn given factor": {
        "rotary": RotaryConfig(
            scaling="yarn", factor=8.0, original_length=32, beta_fast=8.0, attention_factor=0.7
        )
    },
    "llama3": {
        "rotary": RotaryConfig(theta=100.0, scaling="llama3", factor=8.0, original_length=32)
    },
    "biases everywhere": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "one kv head": {"kv_heads": 1},
    "a kv head a query head": {"kv_heads": 4},
    "gemma 3": {
        "qk_norm": True,
        "post_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu_tanh",
        "windows": (5, None),
        "local_rotary": RotaryConfig(theta=10.0),
        "rotary": RotaryConfig(theta=1000.0, scaling="linear", factor=8.0),
        "attention_scale": 0.2,
        "embedding_scale": 24**0.5,
        "tied_embedding": True,
    },
    "caps": {"attention_soft_cap": 0.5, "logit_soft_cap": 0.3, "activation": "gelu"},
}


def run(
    model: Decoder, texts: list[list[int]], cache: caches.Cache, chunks: int = 1
) -> list[np.ndarray]:
    """Logits of every position of some texts, stored together as rows 1, 2, ... in chunks."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state: nnx.State, cache: Any, token_T: jax.Array, start_P: jax.Array) -> Any:
        cache, fits = cache.grow(jnp.diff(start_P))
        view, position_T = cache.view(jnp.diff(start_P) > 0, start_P, token_T.shape[0])
        merged = nnx.merge(graphdef, state)
        hidden, written = merged(token_T, position_T, view)
        return merged.logits(hidden), cache.keep(written), fits

    found: list[list[np.ndarray]] = [[] for _ in texts]
    for chunk in range(chunks):
        parts = [np.array_split(text, chunks)[chunk] for text in texts]
        ends = np.cumsum([0, *map(len, parts)])
        start_P = np.concatenate([[0], ends])[: cache.rows.rows + 1]
        start_P = np.pad(start_P, (0, cache.rows.rows + 1 - len(start_P)), mode="edge")
        token_T = jnp.asarray(np.concatenate(parts), jnp.int32)
        logits, cache, fits = step(state, cache, token_T, jnp.asarray(start_P, jnp.int32))
        assert fits
        for place, one in enumerate(found):
            one.append(np.asarray(logits)[ends[place] : ends[place + 1]])
    return [np.concatenate(one) for one in found]


def cache_of(config: ModelConfig, kind: str, block_size: int = 4) -> caches.Cache:
    """A cache of three rows; a paged one hands out its blocks in a shuffled order."""
    config = dataclasses.replace(config, max_length=64)
    if kind == "dense":
        return caches.create_dense(config, rows=3, kv_dtype="f32")
    blocks = 3 * 64 // block_size
    cache = caches.create_paged(
        config, rows=3, blocks=blocks, block_size=block_size, kv_dtype="f32"
    )
    order = np.random.default_rng(2).permutation(blocks).astype(np.int32)
    pool = cache.table.pool
    pool = pool.replace(queue_N=pool.queue_N.at[: len(order)].set(order))
    rows = cache.rows.replace(table=cache.table.replace(pool=pool))
    return cache.replace(rows=rows)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_float64(name: str) -> None:
    config = dataclasses.replace(TINY, **OPTIONS[name])
    model = random_decoder(config)
    ids = np.random.default_rng(3).integers(0, config.vocabulary, 14).tolist()
    expected = definition.logits(config, definition.weights_of(model), ids)
    for kind in ("dense", "paged"):
        (found,) = run(model, [ids], cache_of(config, kind), chunks=2)
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4, err_msg=kind)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("yarn", {"rotary": RotaryConfig(scaling="linear", factor=4.0)}),
        ("biases everywhere", {"qkv_bias": False}),
        ("gemma 3", {"windows": (6, None)}),
        ("gemma 3", {"local_rotary": None}),
        ("caps", {"attention_soft_cap": None}),
    ],
)
def test_a_wrong_option_is_seen(name: str, change: dict) -> None:
    """The tolerance above is far below what an option moves."""
    config = dataclasses.replace(TINY, **OPTIONS[name])
    held = definition.weights_of(random_decoder(config))
    ids = np.random.default_rng(3).integers(0, config.vocabulary, 14).tolist()
    right = definition.logits(config, held, ids)
    changed = dataclasses.replace(config, **change)
    if "qkv_bias" in change:
        held = {key: value for key, value in held.items() if "query.bias" not in key}
    wrong = definition.logits(changed, held, ids)
    assert np.abs(wrong - right).max() > 5e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_families(family: str, shared_data: Callable[[str], Path]) -> None:
    folder = shared_data(f"hf_tiny/{family}")
    loaded = weights.load(folder)
    assert loaded.config.dtype == "float32"
    assert loaded.end_ids == (2,)
    expected = json.loads((folder / "expected.json").read_text())
    greedy = [answer["tokens"] for answer in expected["greedy"]]
    texts = [ids + drawn[:-1] for ids, drawn in zip(expected["ids"], greedy, strict=True)]
    for kind in ("dense", "paged"):
        found = run(loaded.decoder, texts, cache_of(loaded.config, kind))
        with np.load(folder / "logits.npz") as answers:
            for number, ids in enumerate(expected["ids"]):
                distance = np.abs(found[number][: len(ids)] - answers[f"prompt{number}"]).max()
                assert distance <= 1e-4
                drawn = found[number][len(ids) - 1 :].argmax(axis=1).tolist()
                assert drawn == greedy[number]


def test_stories_logits(shared_data: Callable[[str], Path]) -> None:
    loaded = weights.load(shared_data("model_stories260k/stories260K.bin"))
    with np.load(shared_data("model_stories260k/reference_logits.npz")) as answers:
        ids, expected = answers["ids"].tolist(), answers["logits"]
    for kind in ("dense", "paged"):
        (found,) = run(loaded.decoder, [ids], cache_of(loaded.config, kind))
        assert np.abs(found - expected).max() <= 1e-4


def test_definition_agrees_with_transformers(shared_data: Callable[[str], Path]) -> None:
    """The float64 definition is itself under test."""
    folder = shared_data("hf_tiny/gemma2_softcap")
    loaded = weights.load(folder)
    ids = json.loads((folder / "expected.json").read_text())["ids"][1]
    found = definition.logits(loaded.config, definition.weights_of(loaded.decoder), ids)
    with np.load(folder / "logits.npz") as answers:
        assert np.abs(found - answers["prompt1"]).max() <= 1e-4
