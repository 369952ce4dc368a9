"""How a kernel cuts its problem, and where the numbers come from.

A back end's ``default_tiling`` is a formula; ``tuned/<device kind>.json`` overrides it with
measured entries, ``{"backend": ..., "when": {field of Problem: value, ...}, "tiling": {...}}``, of
which the first whose every ``when`` holds counts; what the caller sets overrides both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

import jax

from pallas_kernels.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Sizes of a kernel's tiles. A field that is None is the back end's to choose.

    Raises ``ValueError`` for a size below 1; what else is legal is the back end's to say.
    """

    queries: int | None = None  # query tokens of a row that share one pass over its cache
    tokens: int | None = None  # stored tokens of one step of the inner loop
    heads: int | None = None  # key/value heads of one program
    splits: int | None = None  # parts of a row's cache attended apart, then merged
    stages: int | None = None  # buffers of the copies in flight

    def __post_init__(self) -> None:
        for field, value in dataclasses.asdict(self).items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"tiling.{field}: expected a whole number from 1, got {value!r}")


def fill(given: Tiling | None, default: Tiling) -> Tiling:
    """``given`` with its open fields taken from ``default``."""
    if given is None:
        return default
    if not isinstance(given, Tiling):
        raise ValueError(f"tiling: expected a Tiling, got {type(given).__name__}")
    chosen = {name: value for name, value in dataclasses.asdict(given).items() if value is not None}
    return dataclasses.replace(default, **chosen)


def tuned(backend: str, problem: Problem, kind: str | None = None) -> Tiling | None:
    """The tuned tiling of a problem on a device kind (default: the default device's), if any."""
    sizes = dataclasses.asdict(problem)
    for entry in _entries(kind or default_device().device_kind):
        if entry["backend"] == backend and all(
            sizes[name] == value for name, value in entry["when"].items()
        ):
            return Tiling(**entry["tiling"])
    return None


def default_device() -> Any:
    """The device that this process computes on where nothing says otherwise."""
    device = jax.config.jax_default_device
    return jax.devices(device)[0] if device is None or isinstance(device, str) else device


def file_name(kind: str) -> str:
    """The file of a device kind's tuned entries."""
    return kind.lower().replace(" ", "_") + ".json"


@functools.cache
def _entries(kind: str) -> list[dict[str, Any]]:
    path = importlib.resources.files("pallas_kernels") / "tuned" / file_name(kind)
    return json.loads(path.read_text()) if path.is_file() else []
