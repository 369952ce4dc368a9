"""Hugging Face directories: ``config.json`` beside one safetensors file, or shards and an index."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from paged_jax.config import MOST
from paged_jax.model.weights import assembly, hf_config

_PARTS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
}
_SANDWICH = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def load(folder: Path, dtype: str | None = None) -> assembly.Loaded:
    """The model of a directory. Raises ``ValueError`` naming the file and what is wrong in it."""
    config = hf_config.read(folder / "config.json", dtype)
    with contextlib.ExitStack() as stack:
        tensors = _open(folder, stack)
        decoder = assembly.assemble(
            config,
            tensors,
            lambda path: _name(path, config.post_norms),
            spare=lambda name: (
                name.endswith("rotary_emb.inv_freq")
                or (config.tied_embedding and name == "lm_head.weight")
            ),
        )
    return assembly.Loaded(config=config, decoder=decoder, end_ids=_end_ids(folder))


def _end_ids(folder: Path) -> tuple[int, ...]:
    """``eos_token_id`` of the generation settings, else of the config."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        found = hf_config.fields(path).get("eos_token_id") if path.exists() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(one, int) and 0 <= one < MOST for one in ids):
            raise ValueError(f"{path}: eos_token_id: expected token ids, got {found!r}")
        return tuple(ids)
    return ()


def _name(path: str, sandwich: bool) -> str:
    """Hugging Face's name of a weight of ours."""
    if path == "embedding":
        return "model.embed_tokens.weight"
    if path == "norm.weight":
        return "model.norm.weight"
    if path == "head.weight":
        return "lm_head.weight"
    _layers, layer, rest = path.split(".", 2)
    part, _, kind = rest.rpartition(".")
    parts = _PARTS | _SANDWICH if sandwich else _PARTS
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def _open(folder: Path, stack: contextlib.ExitStack) -> assembly.Tensors:
    """The tensors of all files of a directory; files stay open for the stack's life."""
    file_of: dict[str, Any] = {}
    for path in _files(folder):
        with _faults(path):
            opened = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            for name in opened.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
                if name in file_of:
                    raise ValueError(f"{path}: tensor {name} stands in two files")
                file_of[name] = (path, opened)

    def read(name: str) -> np.ndarray:
        path, opened = file_of[name]
        with _faults(path):
            return opened.get_tensor(name)

    return assembly.Tensors(origin=str(folder), names=file_of.keys(), read=read)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        found = folder / "model.safetensors"
        if not found.exists():
            raise ValueError(f"{folder}: neither model.safetensors nor its index is there")
        return [found]
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index}: expected a JSON object with a weight_map") from None
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{index}: names {name}, which is not there")
    return [folder / name for name in names]


@contextlib.contextmanager
def _faults(path: Path) -> Iterator[None]:
    try:
        yield
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
