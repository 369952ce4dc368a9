"""``experiments.generate``: the same tokens as the definition, and one line for what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import models as token_models
from tokenizers import pre_tokenizers

from experiments import generate
from paged_jax.serving import settings
from tests.support import decoder as definition
from tests.support.commands import Done, call, one_line
from tests.support.models import TINY, random_decoder

CONFIG = dataclasses.replace(TINY, layers=1)
SMALL = ("--block_size=4", "--pool_slots=256", "--max_length=32")
HUGGING_FACE = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


run = functools.partial(call, generate)


def objects(done: Done) -> list[dict]:
    """The JSON object of each line that a command printed."""
    assert done.code == 0, done.err
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(CONFIG)


@pytest.fixture(scope="module")
def model(decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random weights, and a tokenizer of the words w0 to w60."""
    folder = tmp_path_factory.mktemp("model")
    tensors = {
        hugging_face(name): np.ascontiguousarray(
            array.T if name.endswith("kernel") else array, np.float32
        )
        for name, array in definition.weights_of(decoder).items()
    }
    save_file(tensors, folder / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": CONFIG.vocabulary,
        "hidden_size": CONFIG.width,
        "num_hidden_layers": CONFIG.layers,
        "num_attention_heads": CONFIG.query_heads,
        "num_key_value_heads": CONFIG.kv_heads,
        "head_dim": CONFIG.head_width,
        "intermediate_size": CONFIG.mlp_width,
        "max_position_embeddings": CONFIG.max_length,
        "rms_norm_eps": CONFIG.norm_epsilon,
        "rope_theta": CONFIG.rotary.theta,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    words = {f"w{number}": number for number in range(CONFIG.vocabulary)}
    tokenizer = tokenizers.Tokenizer(token_models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def hugging_face(name: str) -> str:
    """Hugging Face's name of a weight of ours."""
    if not name.startswith("layers."):
        names = {"embedding": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        return names.get(name, "lm_head.weight")
    _, layer, rest = name.split(".", 2)
    part = rest.rpartition(".")[0]
    return f"model.layers.{layer}.{HUGGING_FACE.get(part, f'{part}_proj')}.weight"


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may break, without a tokenizer."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    return tmp_path


def words(ids: list[int]) -> str:
    """The text of ids."""
    return " ".join(f"w{one}" for one in ids)


def test_json_lines(model: Path, decoder) -> None:
    """Exactly the keys that are promised, and the definition's tokens, from ids and from text."""
    prompts = [[3, 14, 15], [9]]
    ids = [f"--prompt_ids={','.join(map(str, prompt))}" for prompt in prompts]
    common = (f"--model={model}", *SMALL, "--rows=1", "--max_tokens=6", "--json")
    paged = run(*common, *ids)
    assert paged.err == ""
    weights = definition.weights_of(decoder)
    for prompt, found in zip(prompts, objects(paged), strict=True):
        assert list(found) == ["prompt", "prompt_ids", "outputs", "memory"]
        (output,) = found["outputs"]
        assert list(output) == ["token_ids", "text", "cumulative_logprob", "finish_reason"]
        assert (found["prompt"], found["prompt_ids"]) == (None, prompt)
        assert output["token_ids"] == definition.greedy(CONFIG, weights, prompt, 6)
        assert output["text"] == words(output["token_ids"])
        assert output["finish_reason"] == "length"
        logits = definition.logits(CONFIG, weights, prompt + output["token_ids"])[len(prompt) - 1 :]
        chosen = [row[one] for row, one in zip(logits, output["token_ids"], strict=False)]
        expected = sum(chosen) - np.log(np.exp(logits[:6]).sum(axis=1)).sum()
        assert output["cumulative_logprob"] == pytest.approx(expected, abs=1e-3)
    assert sum(found["memory"]["slots"].values()) == found["memory"]["pool_slots"] == 256
    spoken = run(*common, *(f"--prompt={words(prompt)}" for prompt in prompts))
    for said, found, prompt in zip(objects(spoken), objects(paged), prompts, strict=True):
        assert said == {**found, "prompt": words(prompt)}
    dense = run(*common, *ids, "--cache=dense")
    assert [one["outputs"][0]["token_ids"] for one in objects(dense)] == [
        one["outputs"][0]["token_ids"] for one in objects(paged)
    ]


def test_streams_what_json_holds(model: Path) -> None:
    common = (f"--model={model}", *SMALL, "--rows=1", "--prompt=w5 w7", "--max_tokens=9")
    (found,) = objects(run(*common, "--json"))
    assert run(*common) == Done(0, f"{found['outputs'][0]['text']}\n", "")
    stop = found["outputs"][0]["text"].split()[4]
    stopped = run(*common, f"--stop={stop}")
    assert stopped.out == found["outputs"][0]["text"].partition(stop)[0] + "\n"


def test_samples(model: Path) -> None:
    common = (f"--model={model}", *SMALL, "--prompt_ids=5,7,11,13,17", "--max_tokens=3")
    drawn = objects(run(*common, "--n=4", "--temperature=2", "--seed=4", "--json"))[0]
    assert len({tuple(one["token_ids"]) for one in drawn["outputs"]}) == 4
    assert (
        drawn["memory"]["saved_slots"] > 0
    )  # the full block of the prompt's five tokens is shared
    listed = run(*common, "--n=4", "--temperature=2", "--seed=4")
    expected = [f"[{n}] {one['text']}" for n, one in enumerate(drawn["outputs"])]
    assert listed.out.splitlines() == expected


@pytest.mark.slow
def test_beams(model: Path, decoder) -> None:
    """Beams of one token are the likeliest tokens, best first."""
    common = (f"--model={model}", *SMALL, "--prompt_ids=5,7", "--max_tokens=1", "--json")
    (beams,) = objects(run(*common, "--beam_width=3"))
    logits = definition.logits(CONFIG, definition.weights_of(decoder), [5, 7])[-1]
    best = np.argsort(-logits)[:3].tolist()
    assert [one["token_ids"] for one in beams["outputs"]] == [[token] for token in best]
    assert [one["text"] for one in beams["outputs"]] == [f"w{token}" for token in best]
    expected = logits[best] - np.log(np.exp(logits).sum())
    scores = [one["cumulative_logprob"] for one in beams["outputs"]]
    assert scores == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--prompt or --prompt_ids"),
        (("--prompt_ids=1,x",), "--prompt_ids: expected whole numbers as 1,2,3, got '1,x'"),
        (("--prompt_ids=",), "--prompt_ids: expected whole numbers as 1,2,3, got ''"),
        (("--prompt_ids=3,61",), "token 61 is not in the vocabulary of 61"),
        (("--prompt_ids=-1",), "token -1 is not in the vocabulary"),
        (("--prompt=",), "it has no tokens"),
        (("--prompt=\udcff",), "not valid Unicode"),
        (("--prompt=" + "w1 " * 33,), "33 tokens and 64 to come pass the context of 32"),
        (("--prompt_ids=1", "--max_tokens=32"), "1 tokens and 32 to come pass the context of 32"),
        (("--prompt_ids=1", "--pool_slots=8", "--max_tokens=20"), "pool_slots: "),
        (("--prompt_ids=1", "--pool_slots=3"), "pool_slots: 3 is less than one block of 4"),
        (("--prompt_ids=1", "--pool_slots=8", "--beam_width=2", "--max_tokens=9"), "pool_slots: "),
        (
            ("--prompt_ids=1", "--n=33", "--max_tokens=1"),
            "n: expected at most 32 sequences, got 33",
        ),
        (("--prompt_ids=1", f"--seed={2**32}"), "seed: "),
        (("--prompt_ids=1", "--temperature=1", f"--top_k={2**32}"), "top_k: "),
        (("--prompt_ids=1", "--temperature=nan"), "temperature: "),
        (("--prompt_ids=1", "--temperature=inf"), "temperature: "),
        (("--prompt_ids=1", "--repetition_penalty=inf"), "repetition_penalty: "),
        (("--prompt_ids=1", "--beam_width=-2"), "beam_width: "),
        (("--prompt_ids=1", "--beam_width=2", "--length_penalty=nan"), "length_penalty: "),
        (("--prompt_ids=1", "--length_penalty=2"), "--length_penalty: without --beam_width"),
        (("--prompt_ids=1", "--cache=dense", "--backend=xla"), "--backend: a dense cache"),
        (("--prompt_ids=1", "--cache=dense", "--kv_dtype=int8"), "kv_dtype: a dense cache"),
        (("--prompt_ids=1", "--stop="), "stop: "),
        (("--prompt_ids=1", "--n=none"), "--n=none"),
        (("--prompt_ids=1", "--nothing"), "nothing"),
        (("--prompt_ids=1", "word"), "expected flags only, got 'word'"),
    ],
)
def test_wrong_flags_are_one_line(model: Path, arguments: tuple, part: str) -> None:
    one_line(run(f"--model={model}", *SMALL, *arguments), part)


@pytest.mark.parametrize(
    "flag",
    [
        "--n=2",
        "--temperature=0.5",
        "--top_k=3",
        "--top_p=0.5",
        "--min_p=0.1",
        "--repetition_penalty=1.1",
        "--stop=x",
        "--seed=1",
    ],
)
def test_beam_search_refuses_what_it_would_not_heed(model: Path, flag: str) -> None:
    done = run(f"--model={model}", "--prompt_ids=1", "--beam_width=2", flag)
    one_line(done, flag.partition("=")[0], "beam search")


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    for name, content in (("notes.txt", b"no model"), ("cut.bin", b"1234"), ("cut.gguf", b"GGUF")):
        (tmp_path / name).write_bytes(content)
        one_line(run(f"--model={tmp_path / name}", "--prompt_ids=1"), tmp_path / name)
    one_line(run(f"--model={tmp_path}", "--prompt_ids=1"), tmp_path, "not a model")
    one_line(run(f"--model={tmp_path / 'gone'}", "--prompt_ids=1"), "no such file or folder")
    one_line(run("--prompt_ids=1"), "--model")


def test_broken_weights_are_one_line(broken: Path) -> None:
    arguments = (f"--model={broken}", "--prompt_ids=1")
    path, name = broken / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors, data = load_file(path), path.read_bytes()
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    one_line(run(*arguments), broken, name, "missing")
    save_file({**tensors, name: tensors[name][1:]}, path)
    one_line(run(*arguments), broken, name, "(40, 24)", "(39, 24)")
    for wrong in (data[:-1], data[:4], b"\xff" * 8 + data[8:], data[:8] + b"\xff" * 64 + data[72:]):
        path.write_bytes(wrong)
        one_line(run(*arguments), path, "not a readable")
    path.unlink()
    one_line(run(*arguments), broken, "model.safetensors")


def test_text_without_a_tokenizer_is_one_line(broken: Path) -> None:
    one_line(run(f"--model={broken}", "--prompt=w1"), "no tokenizer, give token ids")
    one_line(run(f"--model={broken}", "--prompt_ids=1", "--stop=x"), "stop: the model has no token")


def test_a_cache_without_room_is_one_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 384000000000 bytes")

    monkeypatch.setattr(settings, "_create_cache", full)
    one_line(run(f"--model={model}", "--prompt_ids=1"), "pool_slots: no memory", "384000000000")


def test_the_absent_demo_model_says_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one_line(run("--model=smollm2", "--prompt=x"), "smollm2", "make demo-model")


@pytest.mark.slow
def test_the_demo_model_knows_paris(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    if not generate.DEMO_MODEL.exists():
        pytest.skip(f"{generate.DEMO_MODEL} is not there, `make demo-model` brings it")
    question = ("--model=smollm2", "--prompt=The capital of France is", "--max_tokens=5", "--json")
    paged, dense = (
        objects(run(*question, "--max_length=64", "--pool_slots=64", f"--cache={cache}"))[0]
        for cache in ("paged", "dense")
    )
    assert "Paris" in paged["outputs"][0]["text"]
    assert dense["outputs"][0]["token_ids"] == paged["outputs"][0]["token_ids"]
