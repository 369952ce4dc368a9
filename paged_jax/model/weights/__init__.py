"""Decoders from the files people have, chosen by what lies at a path."""

from __future__ import annotations

from pathlib import Path

from paged_jax.model.weights import checkpoint, gguf_file, huggingface, llama2c
from paged_jax.model.weights.assembly import Loaded

_READERS = {".gguf": gguf_file.load, ".bin": llama2c.load}


def load(path: Path | str, dtype: str | None = None) -> Loaded:
    """The model at a path: a Hugging Face folder, a ``.gguf`` file, a llama2.c ``.bin``, or a
    folder that ``experiments.train`` made.

    ``dtype``: float32 or bfloat16; default: the file's own where it is one of them, else float32.
    Raises ``ValueError``, naming file and fault, for anything that is not such a model.
    """
    path = Path(path)
    if path.is_dir() and (path / "config.json").exists():
        return huggingface.load(path, dtype)
    if path.is_dir() and (path / checkpoint.CONFIG).exists():
        return checkpoint.load(path, dtype)
    if path.is_file() and path.suffix in _READERS:
        return _READERS[path.suffix](path, dtype)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    raise ValueError(
        f"{path}: not a model: expected a folder with config.json or model.json,"
        " or a .gguf or .bin file"
    )
