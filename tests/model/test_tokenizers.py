"""Tokenizers: ids of other implementations, texts that come back, files that are broken."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers as library
from tokenizers import models, pre_tokenizers

from paged_jax.model import tokenizers

TEXTS = ["Once upon a time", "", " two  spaces ", "naïve café ☃", "tab\tand\nline"]


def test_stories_prompts(shared_data: Callable[[str], Path]) -> None:
    folder = shared_data("model_stories260k")
    tokenizer = tokenizers.load(folder / "stories260K.bin")
    assert tokenizer is not None
    for run in json.loads((folder / "reference_greedy.json").read_text())["runs"]:
        assert tokenizer.encode(run["prompt"]) == run["prompt_ids"]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_best_score_is_merged_first_and_bytes_stand_in() -> None:
    pieces = [b"<s>", b"</s>", b" ", b"a", b"b", b"c", b"ab", b"bc", b"abc"]
    scores = [0.0, 0, -9, -9, -9, -9, -2, -1, -3]
    byte_ids = {byte: 100 + byte for byte in range(256)}
    padded = pieces + [b""] * 400
    tokenizer = tokenizers.ScoredTokenizer(
        padded, scores + [0.0] * 400, byte_ids=byte_ids, first_id=0, end_id=1
    )
    # "bc" scores best and goes first; then "a" + "bc" is a piece too.
    assert tokenizer.encode("abc") == [0, 2, 8]
    assert tokenizer.encode("abab") == [0, 2, 6, 6]
    assert tokenizer.encode("é") == [0, 2, 100 + 0xC3, 100 + 0xA9]
    assert tokenizer.decode([100 + 0xC3, 100 + 0xA9]) == "é"
    assert tokenizer.decode([100 + 0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_tokenizer_json(tmp_path: Path) -> None:
    written = library.Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    written.pre_tokenizer = pre_tokenizers.Whitespace()
    written.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("two one three") == [1, 0, 2]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable tokenizer"):
        tokenizers.load(tmp_path)


def test_a_folder_without_one(tmp_path: Path) -> None:
    assert tokenizers.load(tmp_path) is None
    (tmp_path / "model.json").write_text("{}")  # what experiments.train leaves: bytes
    tokenizer = tokenizers.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


def test_a_broken_llama2c_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tok.bin").write_bytes(struct.pack("<ifi", 9, 0.0, 50) + b"short")
    with pytest.raises(ValueError, match=r"tok\.bin: not a llama2\.c tokenizer: broken at byte 12"):
        tokenizers.load(tmp_path / "model.bin")


def test_another_models_llama2c_tokenizer(tmp_path: Path) -> None:
    """Pieces are numbered by place: of another count they are another model's."""
    (tmp_path / "tok.bin").write_bytes(struct.pack("<ifi", 9, 0.0, 1) + b"a")
    (tmp_path / "model.bin").write_bytes(struct.pack("<7i", 8, 8, 1, 1, 1, -512, 16))
    with pytest.raises(ValueError, match=r"tok\.bin: 1 pieces for model\.bin's 512 tokens"):
        tokenizers.load(tmp_path / "model.bin")
