"""GGUF: Q4_K against the format's definition, and the vocabularies that files carry."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from experiments.generate import DEMO_MODEL
from paged_jax.model import tokenizers, weights
from paged_jax.model.tokenizers import Tokenizer
from tests.support import decoder as definition

SIZES = {
    "width": 256,
    "layers": 1,
    "query_heads": 2,
    "kv_heads": 1,
    "head_width": 128,
    "mlp_width": 256,
    "max_length": 16,
}
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
BYTE_SPACE = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # a space in byte-level vocabularies
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def random_q4k(random: np.random.Generator, rows: int, width: int) -> np.ndarray:
    """Super-blocks of any bytes but for their two scales, which are numbers of a decent size."""
    packed = random.integers(0, 256, (rows, width // 256, 144), np.uint8)
    scale = random.uniform(-0.02, 0.02, (rows, width // 256, 2)).astype("<f2")
    packed[..., :4] = scale.view(np.uint8)
    return packed.reshape(rows, -1)


def q4k_values(packed: np.ndarray) -> np.ndarray:
    """What Q4_K means, one value after another.

    256 values in 144 bytes: two f16, d and m; 12 bytes with eight 6-bit scales s and eight 6-bit
    minima t; 128 bytes of nibbles. Sub-block j of 32 values is ``d * s[j] * nibble - m * t[j]``,
    and takes the low nibbles of the 32 bytes that sub-blocks 2i and 2i + 1 share, or the high ones.
    """
    rows = []
    for row in packed:
        values: list[float] = []
        for block in row.reshape(-1, 144):
            d, m = (float(x) for x in block[:4].view("<f2"))
            six = [int(x) for x in block[4:16]]
            for j in range(8):
                if j < 4:
                    s, t = six[j] % 64, six[j + 4] % 64
                else:
                    s = six[j + 4] % 16 + 16 * (six[j - 4] // 64)
                    t = six[j + 4] // 16 + 16 * (six[j] // 64)
                nibbles = [int(x) for x in block[16 + 32 * (j // 2) :][:32]]
                values += [d * s * (x // 16 if j % 2 else x % 16) - m * t for x in nibbles]
        rows.append(values)
    return np.array(rows)


def test_q4k_is_read_as_it_is_defined(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = {"blk.0.attn_norm": 256, "blk.0.ffn_norm": 256, "output_norm": 256}
    matrices = {
        "token_embd": 8,
        "blk.0.attn_q": 256,
        "blk.0.attn_k": 128,
        "blk.0.attn_v": 128,
        "blk.0.attn_output": 256,
        "blk.0.ffn_gate": 256,
        "blk.0.ffn_up": 256,
        "blk.0.ffn_down": 256,
    }
    writer = header(tmp_path / "model.gguf")
    for name, width in vectors.items():
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    packed = {name: random_q4k(random, rows, 256) for name, rows in matrices.items()}
    for name, array in packed.items():
        kind = gguf.GGMLQuantizationType.Q4_K
        writer.add_tensor(f"{name}.weight", array, raw_dtype=kind)
    finish(writer)
    found = definition.weights_of(weights.load(tmp_path / "model.gguf").decoder)
    ours = {
        "embedding": q4k_values(packed["token_embd"]),
        "layers.0.attention.value.weight": q4k_values(packed["blk.0.attn_v"]),
        "layers.0.mlp.down.weight": q4k_values(packed["blk.0.ffn_down"]),
    }
    # Neighbours 2i and 2i + 1 of a head turn together in the file, i and i + 64 here.
    query = q4k_values(packed["blk.0.attn_q"])
    order = [128 * head + 2 * i + half for head in (0, 1) for half in (0, 1) for i in range(64)]
    ours["layers.0.attention.query.weight"] = query[order]
    for name, expected in ours.items():
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6)


def header(path: Path) -> gguf.GGUFWriter:
    """A file that says what the decoder is."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(SIZES["max_length"])
    writer.add_embedding_length(SIZES["width"])
    writer.add_feed_forward_length(SIZES["mlp_width"])
    writer.add_head_count(SIZES["query_heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vocabulary(
    path: Path, kind: str, tokens: list[str], types: list[int], **fields: object
) -> Path:
    """A file with a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    finish(writer)
    return path


def loaded(path: Path) -> Tokenizer:
    tokenizer = tokenizers.load(path)
    assert tokenizer is not None
    return tokenizer


def scored(path: Path, **fields: object) -> Path:
    """A vocabulary of scored pieces: three special ones, all bytes, and some words."""
    pieces = {SPACE: -9.0, "a": -8.0, "b": -8.0, "ab": -3.0, f"{SPACE}a": -2.0, f"{SPACE}ab": -1.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + list(pieces.values())
    given = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2} | fields
    return vocabulary(path, "llama", tokens, types, **given)


def test_scored_pieces(tmp_path: Path) -> None:
    tokenizer = loaded(scored(tmp_path / "scored.gguf"))
    space, a, b, ab, space_a, space_ab = range(259, 265)
    # " ab": of "ab" (-3) and " a" (-2) the second goes first, and " a" + "b" is a piece too.
    assert tokenizer.encode("ab") == [1, space_ab]
    assert tokenizer.encode("ba") == [1, space, b, a]
    assert tokenizer.encode("bab") == [1, space, b, ab]
    assert tokenizer.encode("a é") == [1, space_a, space, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.encode("") == [1]
    for text in ("ab", " ab", "a  b\n", "é☃"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([space_ab, 2]) == " ab"


def test_scored_pieces_without_what_is_usual(tmp_path: Path) -> None:
    """No token to begin with, no space before the text: the file says so."""
    path = scored(tmp_path / "plain.gguf", add_bos_token=False, add_space_prefix=False)
    tokenizer = loaded(path)
    space, a, _, ab, *_ = range(259, 265)
    assert tokenizer.encode("ab") == [ab]
    assert tokenizer.encode(" ba")[0] == space
    assert tokenizer.encode("aa") == [a, a]
    assert tokenizer.encode("") == []
    few = vocabulary(
        tmp_path / "few.gguf", "llama", ["<s>", SPACE], [CONTROL, NORMAL], token_scores=[0.0, 0.0]
    )
    assert loaded(few).encode(" ") == [1, 1]
    with pytest.raises(ValueError, match="prompt: the tokenizer has no token for byte 0x7a"):
        loaded(few).encode("z")


def merged(path: Path, **fields: object) -> Path:
    """A byte-level vocabulary with three merges, digits one by one."""
    tokens = ["<|end|>", "h", "i", "1", "2", BYTE_SPACE, "hi", f"{BYTE_SPACE}hi", "12"]
    given = {
        "token_merges": ["h i", f"{BYTE_SPACE} hi", "1 2"],
        "tokenizer_pre": "smollm",
        "bos_token_id": 0,
    }
    types = [CONTROL, *[NORMAL] * 8]
    return vocabulary(path, "gpt2", tokens, types, **(given | fields))


def test_byte_level_merges(tmp_path: Path) -> None:
    tokenizer = loaded(merged(tmp_path / "merged.gguf"))
    assert tokenizer.encode("hi hi") == [6, 7]
    assert tokenizer.encode("hi12") == [6, 3, 4]  # no merge across digits
    assert tokenizer.encode("hi<|end|>hi") == [6, 0, 6]
    assert tokenizer.decode([6, 0, 7]) == "hi hi"
    assert loaded(merged(tmp_path / "begun.gguf", add_bos_token=True)).encode("hi") == [0, 6]
    older = loaded(merged(tmp_path / "older.gguf", tokenizer_pre="gpt-2"))
    assert older.encode("hi12") == [6, 8]  # digits stay together


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"tokenizer_pre": "unheard-of"}, "split unheard-of is not supported"),
        ({"token_merges": ["h q"]}, "tokenizer merges"),
        ({"token_merges": ["h"]}, "'h' is no pair"),
        ({"token_types": [CONTROL]}, "9 tokens, 1 types"),
    ],
)
def test_broken_vocabularies_are_named(tmp_path: Path, fields: dict, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        tokenizers.load(merged(tmp_path / "broken.gguf", **fields))
    assert "broken.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    """Prompts of token ids need none."""
    writer = header(tmp_path / "model.gguf")
    finish(writer)
    assert tokenizers.load(tmp_path / "model.gguf") is None


@pytest.mark.slow
def test_the_demo_models_tokenizer() -> None:
    """Facts of SmolLM2's vocabulary, and texts that come back as they were."""
    path = Path(__file__).resolve().parents[2] / DEMO_MODEL
    if not path.exists():
        pytest.skip(f"{DEMO_MODEL} is not there, `make demo-model` brings it")
    tokenizer = loaded(path)
    for text in (
        "The capital of France is",
        " two  spaces ",
        "naïve café ☃ 東京",
        "a\n\tb 2024",
        "",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    begin, *_, newline = tokenizer.encode("<|im_start|>user\n")
    assert tokenizer.encode("\n") == [newline]
    assert tokenizer.decode([begin]) == ""
    year = tokenizer.encode("2024")
    assert [tokenizer.decode([one]) for one in year] == ["2", "0", "2", "4"]
