"""Text to token ids and back, from what lies beside or inside a model.

Four kinds: bytes; Hugging Face's ``tokenizer.json``; the byte-level merges of a GGUF file, put
together for the ``tokenizers`` package; and vocabularies with a score a piece (llama2.c, and GGUF's
"llama"), where the adjacent pair whose union scores best is merged until none is a piece.
"""

from __future__ import annotations

import heapq
import struct
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paged_jax.model.weights import checkpoint, gguf_file

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece vocabularies


class Tokenizer(Protocol):
    """Encodes prompts as its model was trained to see them, special tokens included."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens left out; what is not valid UTF-8 becomes U+FFFD."""
        ...


class JsonTokenizer:
    """A tokenizer of the ``tokenizers`` package."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, first_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._first = [] if first_id is None else [first_id]

    def encode(self, text: str) -> list[int]:
        """As ``Tokenizer.encode``."""
        return self._first + self._tokenizer.encode(text).ids

    def decode(self, ids: list[int]) -> str:
        """As ``Tokenizer.decode``."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class ByteTokenizer:
    """A token a byte, as the models that this project trains have it."""

    def encode(self, text: str) -> list[int]:
        """As ``Tokenizer.encode``."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """As ``Tokenizer.decode``."""
        return bytes(ids).decode(errors="replace")


class ScoredTokenizer:
    """Pieces with scores. A space is put before a text, unknown characters are bytes."""

    def __init__(
        self,
        pieces: list[bytes],
        scores: list[float],
        *,
        byte_ids: dict[int, int],
        first_id: int | None,
        end_id: int | None,
        prefix: str = " ",
    ) -> None:
        self._pieces = pieces
        self._scores = scores
        self._ids = {piece: number for number, piece in reversed(list(enumerate(pieces)))}
        self._byte_ids = byte_ids
        self._bytes = {number: bytes([byte]) for byte, number in byte_ids.items()}
        self._first = [] if first_id is None else [first_id]
        self._special = {first_id, end_id}
        self._prefix = prefix

    def encode(self, text: str) -> list[int]:
        """As ``Tokenizer.encode``."""
        return self._first + (self._merge(self._prefix + text) if text else [])

    def decode(self, ids: list[int]) -> str:
        """As ``Tokenizer.decode``."""
        parts = [self._bytes.get(one, self._pieces[one]) for one in ids if one not in self._special]
        text = b"".join(parts).decode(errors="replace")
        # The space that encoding put before the text is not the text's.
        begins = self._first and ids[:1] == self._first
        return text.removeprefix(self._prefix) if begins else text

    def _merge(self, text: str) -> list[int]:
        """Merges the best pair, the leftmost of equals, until no pair is a piece."""
        parts: list[bytes | None] = []
        for character in text:
            piece = character.encode()
            known = piece in self._ids
            parts += [piece] if known else [bytes([byte]) for byte in piece]
        after = [*range(1, len(parts)), -1]
        before = list(range(-1, len(parts) - 1))
        heap: list[tuple[float, int, bytes]] = []

        def offer(left: int) -> None:
            right = after[left] if left >= 0 else -1
            if right >= 0:
                union = (parts[left] or b"") + (parts[right] or b"")
                if union in self._ids:
                    heapq.heappush(heap, (-self._scores[self._ids[union]], left, union))

        for left in range(len(parts)):
            offer(left)
        while heap:
            _, left, union = heapq.heappop(heap)
            right = after[left]
            here = parts[left]
            if here is None or right < 0 or here + (parts[right] or b"") != union:
                continue
            parts[left], parts[right] = union, None
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left])
            offer(left)
        return [self._id(part) for part in parts if part is not None]

    def _id(self, part: bytes) -> int:
        found = self._ids.get(part, self._byte_ids.get(part[0]))
        if found is None:
            raise ValueError(f"prompt: the tokenizer has no token for byte 0x{part[0]:02x}")
        return found


def load(path: Path | str) -> Tokenizer | None:
    """The tokenizer of the model at a path; None where it has none.

    Raises ``ValueError`` naming the file for one that is not readable or of an unknown kind.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    return _from_llama2c(path)


def _from_folder(folder: Path) -> Tokenizer | None:
    if (folder / checkpoint.CONFIG).exists():
        return ByteTokenizer()
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: not a readable tokenizer: {error}") from None
    return JsonTokenizer(tokenizer)


def _from_llama2c(model: Path) -> Tokenizer | None:
    """``tokenizer.bin`` or else the first ``tok*.bin`` beside a llama2.c model."""
    found = [model.with_name("tokenizer.bin"), *sorted(model.parent.glob("tok*.bin"))]
    path = next((path for path in found if path.exists() and path != model), None)
    if path is None:
        return None
    data = path.read_bytes()
    pieces, scores, place = [], [], 4
    try:
        while place < len(data):
            score, size = struct.unpack_from("<fi", data, place)
            place += 8
            if not 0 <= size <= len(data) - place:
                raise struct.error
            pieces.append(data[place : place + size])
            scores.append(score)
            place += size
    except struct.error:
        raise ValueError(f"{path}: not a llama2.c tokenizer: broken at byte {place}") from None
    vocabulary = abs(int(np.fromfile(model, "<i4", count=6)[5]))
    if len(pieces) != vocabulary:
        raise ValueError(f"{path}: {len(pieces)} pieces for {model.name}'s {vocabulary} tokens")
    byte_ids = {byte: byte + 3 for byte in range(256)}
    return ScoredTokenizer(pieces, scores, byte_ids=byte_ids, first_id=1, end_id=2)


# Splits before merging, by the name that llama.cpp gives them.
_SPLITS: dict[str, Any] = {
    "smollm": lambda: [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": lambda: [
        pre_tokenizers.Split(
            tokenizers.Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
_CONTROL, _BYTE = 3, 6  # token types of GGUF


def _from_gguf(path: Path) -> Tokenizer | None:
    reader = gguf_file.open_reader(path)
    if "tokenizer.ggml.model" not in reader.fields:
        return None
    try:
        kind = gguf_file.field(reader, "tokenizer.ggml.model")
        tokens = gguf_file.field(reader, "tokenizer.ggml.tokens")
        types = gguf_file.field(reader, "tokenizer.ggml.token_type")
        if len(types) != len(tokens):
            raise ValueError(f"{path}: tokenizer: {len(tokens)} tokens, {len(types)} types")
        if kind == "llama":
            return _scored(reader, tokens, types)
        if kind != "gpt2":
            raise ValueError(f"{path}: tokenizer {kind} is not supported, gpt2 and llama are")
        split = gguf_file.field(reader, "tokenizer.ggml.pre", "gpt-2")
        merges = gguf_file.field(reader, "tokenizer.ggml.merges")
    except KeyError as error:
        raise ValueError(f"{path}: metadata {error} is missing") from None
    if split not in _SPLITS:
        raise ValueError(f"{path}: tokenizer split {split} is not supported, {list(_SPLITS)} are")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if single := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"{path}: tokenizer merges: {' '.join(single[0])!r} is no pair")
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs)
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: tokenizer merges: {error}") from None
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_SPLITS[split]())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    )
    return JsonTokenizer(tokenizer, _first_id(reader, begins=False))


def _first_id(reader: Any, begins: bool) -> int | None:
    """The token put before a prompt; ``begins`` holds where the file does not say if it is."""
    found = gguf_file.field(reader, "tokenizer.ggml.bos_token_id", -1)
    begins = gguf_file.field(reader, "tokenizer.ggml.add_bos_token", begins)
    return found if begins and found >= 0 else None


def _scored(reader: Any, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = gguf_file.field(reader, "tokenizer.ggml.scores")
    end = gguf_file.field(reader, "tokenizer.ggml.eos_token_id", -1)
    spaced = gguf_file.field(reader, "tokenizer.ggml.add_space_prefix", True)
    return ScoredTokenizer(
        [token.replace(_SPACE, " ").encode() for token in tokens],
        scores,
        byte_ids={
            int(token[1:-1], 16): number
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _BYTE
        },
        first_id=_first_id(reader, begins=True),
        end_id=end if end >= 0 else None,
        prefix=" " if spaced else "",
    )
