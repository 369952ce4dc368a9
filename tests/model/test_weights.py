"""Reading models: every format gives the same weights, and what is wrong is named in one line."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax.config import ModelConfig, RotaryConfig
from paged_jax.model import weights
from paged_jax.model.weights import checkpoint, hf_config
from tests.support import decoder as definition
from tests.support.models import TINY, random_decoder


@pytest.fixture
def folder(tmp_path: Path, shared_data: Callable[[str], Path]) -> Path:
    """A copy of a small checkpoint that a test may break."""
    source = shared_data("hf_tiny/llama_gqa")
    copied = tmp_path / "model"
    copied.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (copied / name).write_bytes((source / name).read_bytes())
    return copied


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def fails_with(path: Path, *parts: str) -> None:
    with pytest.raises(ValueError, match=re.escape(parts[0])) as caught:
        weights.load(path)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message


def test_shards_are_one_model(folder: Path) -> None:
    whole = definition.weights_of(weights.load(folder).decoder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sharded = definition.weights_of(weights.load(folder).decoder)
    assert whole.keys() == sharded.keys()
    assert all((whole[name] == sharded[name]).all() for name in whole)
    (folder / "b.safetensors").unlink()
    fails_with(folder, "index.json", "b.safetensors")


def test_bfloat16_is_stored_as_such(folder: Path) -> None:
    loaded = weights.load(folder, dtype="bfloat16")
    leaves = jax.tree.leaves(nnx.state(loaded.decoder, nnx.Param))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_broken_tensors_are_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    fails_with(folder, name, "missing")
    save_file({**tensors, name: tensors[name][:-1]}, path)
    fails_with(folder, name, "(112, 48)", "(111, 48)")
    save_file({**tensors, "model.layers.9.oddity": tensors[name]}, path)
    fails_with(folder, "model.layers.9.oddity", "not part")


@pytest.mark.parametrize("cut", [0, 4, 9, 300, -7])
def test_truncated_safetensors(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    fails_with(folder, "model.safetensors")


def test_corrupt_safetensors_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(bytes(data))
    fails_with(folder, "model.safetensors", "not a readable")
    path.write_bytes(struct.pack("<Q", 2**60) + bytes(data[8:]))
    fails_with(folder, "model.safetensors")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": 7}, "architecture none named"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rope_parameters": 7}, "config.json"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"num_attention_heads": 5}, "query_heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"vocab_size": 0}, "vocabulary"),
        ({"rms_norm_eps": "small"}, "norm_epsilon"),
        ({"final_logit_softcapping": -1}, "logit_soft_cap"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "wide"}, "windows"),
    ],
)
def test_configs_that_do_not_go(folder: Path, change: dict, part: str) -> None:
    rewrite(folder, **change)
    fails_with(folder, "config.json", part)


def test_a_missing_field_and_no_json(folder: Path) -> None:
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    del fields["num_hidden_layers"]
    path.write_text(json.dumps(fields))
    fails_with(folder, "num_hidden_layers")
    path.write_text("{")
    fails_with(folder, "config.json", "JSON")
    path.write_text("[]")
    fails_with(folder, "config.json", "object")


@pytest.mark.parametrize("name", ["nothing", "file.txt", "folder", "short.bin", "bad.gguf"])
def test_what_is_no_model(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name != "nothing":
        path.write_bytes(b"GGUF and then nothing that follows")
    fails_with(path, name)


def test_truncated_llama2c(tmp_path: Path, shared_data: Callable[[str], Path]) -> None:
    data = shared_data("model_stories260k/stories260K.bin").read_bytes()
    for size in (27, 28, len(data) - 4, len(data) // 2):
        path = tmp_path / "cut.bin"
        path.write_bytes(data[:size])
        fails_with(path, "cut.bin", "not a llama2.c model")


def test_an_end_token_that_is_none(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    fails_with(folder, "generation_config.json", "eos_token_id", "</s>")


def config_of(tmp_path: Path, **fields: object) -> ModelConfig:
    base = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 40,
        "max_position_embeddings": 128,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(base | fields))
    return hf_config.read(path)


def test_gemma3_config(tmp_path: Path) -> None:
    """The older form of the file: pattern and thetas beside the rest."""
    config = config_of(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        query_pre_attn_scalar=64,
        sliding_window=512,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        hidden_activation="gelu_pytorch_tanh",
    )
    assert config.windows == (512,) * 5 + (None, 512)
    assert config.rotary == RotaryConfig(theta=1e6, scaling="linear", factor=8.0)
    assert config.local_rotary == RotaryConfig(theta=1e4)
    assert config.qk_norm
    assert config.post_norms
    assert config.tied_embedding
    assert config.norm_offset == 1
    assert config.attention_scale == 0.125
    assert config.embedding_scale == 32**0.5


def test_yarn_config(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        architectures=["Qwen2ForCausalLM"],
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    )
    assert config.rotary == RotaryConfig(theta=1e6, scaling="yarn", factor=4.0, original_length=32)
    assert config.qkv_bias
    assert not config.output_bias


def test_biases_on_every_projection(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True
    )
    assert config.qkv_bias
    assert config.output_bias
    assert config.mlp_bias


def test_a_checkpoint_of_our_own_comes_back(tmp_path: Path) -> None:
    decoder = random_decoder(TINY)
    checkpoint.write_config(tmp_path, TINY)
    fails_with(tmp_path, "no whole checkpoint")
    with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(3, nnx.state(decoder), {"none": jnp.zeros(1)})
    loaded = weights.load(tmp_path)
    assert loaded.config == TINY
    before, after = definition.weights_of(decoder), definition.weights_of(loaded.decoder)
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    (tmp_path / "model.json").write_text("{}")
    fails_with(tmp_path, "model.json")


def gguf_of(path: Path, config: ModelConfig, decoder: nnx.Module, kind: str) -> None:
    """Writes a decoder as a GGUF file, matrices of one type, by the package's own writer."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_width)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rotary.theta)
    names = {
        "attention.query": "attn_q",
        "attention.key": "attn_k",
        "attention.value": "attn_v",
        "attention.output": "attn_output",
        "attention_norm": "attn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
        "mlp_norm": "ffn_norm",
    }
    for name, array in definition.weights_of(decoder).items():
        stem = name.rpartition(".")[0] or name
        if stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            target = f"blk.{layer}.{names[part]}.weight"
        else:
            target = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}[stem]
            target += ".weight"
        stored = np.ascontiguousarray(array, np.float32)
        if "attn_q" in target or "attn_k" in target:
            # llama.cpp keeps the two halves of a head interleaved.
            halves = stored.reshape(-1, 2, config.head_width // 2, stored.shape[1])
            stored = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(stored.shape))
        if stored.ndim == 1 or kind == "F32":
            writer.add_tensor(target, stored)
        else:
            quantised = gguf.GGMLQuantizationType[kind]
            packed = gguf.quants.quantize(stored, quantised)
            writer.add_tensor(target, packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [("F32", 0.0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 1e-2), ("Q4_0", 0.2), ("Q4_1", 0.2)],
)
def test_gguf_types(tmp_path: Path, kind: str, error: float) -> None:
    config = ModelConfig(
        vocabulary=32,
        width=32,
        layers=1,
        query_heads=2,
        kv_heads=1,
        head_width=32,
        mlp_width=64,
        max_length=16,
        tied_embedding=False,
    )
    decoder = random_decoder(config)
    path = tmp_path / "model.gguf"
    gguf_of(path, config, decoder, kind)
    loaded = weights.load(path)
    assert loaded.config == config
    expected, found = definition.weights_of(decoder), definition.weights_of(loaded.decoder)
    for name, array in expected.items():
        assert np.abs(found[name] - array).max() <= error * np.abs(array).max() + 1e-9
    if kind == "F32":
        path.write_bytes(path.read_bytes()[:-200])
        fails_with(path, "model.gguf")
