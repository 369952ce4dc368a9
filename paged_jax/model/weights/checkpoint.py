"""Orbax checkpoints of this project's own training, kept beside the model's config.

A folder has ``model.json`` (the config) and one numbered folder a checkpoint, of which Orbax keeps
the newest few. A checkpoint exists once it is whole: a write that was cut off leaves a temporary
folder, which is never read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

from paged_jax.config import ModelConfig, RotaryConfig
from paged_jax.model.decoder import Decoder
from paged_jax.model.weights import assembly

CONFIG = "model.json"


class Checkpoints:
    """The checkpoints of one training run. A context manager that waits for the last write."""

    def __init__(self, folder: Path, *, keep: int | None) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, create=True
        )
        # Named here, or what a checkpoint holds could not be asked before it is read.
        handlers = {part: ocp.StandardCheckpointHandler() for part in ("weights", "optimizer")}
        self._folder = folder
        self._manager = ocp.CheckpointManager(
            folder.resolve(), options=options, item_handlers=handlers
        )

    @property
    def latest(self) -> int | None:
        """The newest whole checkpoint's step."""
        return self._manager.latest_step()

    def save(self, step: int, weights: Any, optimizer: Any) -> None:
        """Begins to write a checkpoint in the background, of copies: the arrays may be donated."""
        parts = {"weights": _named(weights), "optimizer": _numbered(optimizer)}
        saves = {name: ocp.args.StandardSave(part) for name, part in parts.items()}
        self._manager.save(step, args=ocp.args.Composite(**saves))

    def restore_weights(self, step: int, like: Any) -> Any:
        """The weights of a checkpoint, in the structure, shapes and types of ``like``.

        Raises ``ValueError``, naming the fault, for a checkpoint that does not hold them whole.
        """
        return self._restore(step, "weights", like, _named)

    def restore_optimizer(self, step: int, like: Any) -> Any:
        """The optimizer's state of a checkpoint, likewise."""
        return self._restore(step, "optimizer", like, _numbered)

    def _restore(self, step: int, part: str, like: Any, flat: Callable[[Any], Any]) -> Any:
        wanted = flat(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like))
        args = ocp.args.Composite(**{part: ocp.args.StandardRestore(wanted)})
        found, fault = None, ""
        with _unheard():
            try:
                _compare(wanted, self._manager.item_metadata(step)[part])
                found = self._manager.restore(step, args=args)[part]
            except Exception as error:  # a file is gone or cut: Orbax raises nothing narrower
                fault = textwrap.shorten(str(error), 300, placeholder=" ...")
        if found is None:
            raise ValueError(f"{self._folder}: checkpoint {step}, {part}: {fault}")
        # In the order of the names given, whatever order they were read in.
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *details: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def write_config(folder: Path, config: ModelConfig) -> None:
    """Puts the model's config into a folder, in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{CONFIG}.tmp"
    draft.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    draft.replace(folder / CONFIG)


def read_config(folder: Path) -> ModelConfig:
    """The config of a folder; ``ValueError`` naming the file where it is none."""
    path = folder / CONFIG
    try:
        fields = json.loads(path.read_text())
        local = fields.pop("local_rotary")
        return ModelConfig(
            **{
                **fields,
                "windows": tuple(fields["windows"]),
                "rotary": RotaryConfig(**fields["rotary"]),
                "local_rotary": RotaryConfig(**local) if local else None,
            }
        )
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a model of this project: {error}") from None


def load(folder: Path, dtype: str | None = None) -> assembly.Loaded:
    """The newest checkpoint's model. Raises ``ValueError`` where there is none, or a broken one."""
    config = read_config(folder)
    config = dataclasses.replace(config, dtype=dtype or config.dtype)
    graphdef, like = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), like)
    with Checkpoints(folder, keep=None) as checkpoints:
        if checkpoints.latest is None:
            raise ValueError(f"{folder}: holds no whole checkpoint")
        weights = checkpoints.restore_weights(checkpoints.latest, like)
    weights = jax.tree.map(lambda leaf: leaf.astype(config.dtype), weights)
    decoder = nnx.merge(graphdef, weights)
    return assembly.Loaded(config=config, decoder=decoder, end_ids=())


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """When a read fails, each of those that Orbax began beside it would print a traceback."""
    heard, sys.unraisablehook = sys.unraisablehook, lambda _: None
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        gc.collect()
        sys.unraisablehook = heard
        for logger in loggers:
            logger.disabled = False


def _compare(wanted: dict[str, Any], stored: Any) -> None:
    """``ValueError`` for an array that is not stored, or in another shape."""
    for name, leaf in wanted.items():
        if stored is None or name not in stored:
            raise ValueError(f"tensor {name} is missing")
        if tuple(stored[name].shape) != leaf.shape:
            raise ValueError(f"{name}: expected shape {leaf.shape}, got {stored[name].shape}")


def _named(weights: Any) -> dict[str, Any]:
    """A decoder's weights by dotted name."""
    leaves = jax.tree.leaves_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _numbered(tree: Any) -> dict[str, Any]:
    return {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(tree))}
