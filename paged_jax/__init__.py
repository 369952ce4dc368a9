"""Paged KV-cache memory: one memory manager that a simulator and an engine both call.

``LLM``, ``SamplingParams`` and ``BeamSearchParams`` load with their first use: importing the
memory manager loads no model.

Importing the package adds a flag to ``XLA_FLAGS``, which XLA reads when JAX first computes: loops
over arrays of up to a gigabyte are compiled to native code on CPU. Without it jax 0.11 does so
for tiny arrays only, and simulates 60 times slower.
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"

_NATIVE_LOOPS = "xla_cpu_small_while_loop_byte_threshold"

if _NATIVE_LOOPS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join(
        [
            *os.environ.get("XLA_FLAGS", "").split(),
            f"--xla_backend_extra_options={_NATIVE_LOOPS}=1000000000",
        ]
    )

_LAZY = {
    "LLM": "paged_jax.serving.llm",
    "SamplingParams": "paged_jax.decoding.sampling",
    "BeamSearchParams": "paged_jax.decoding.beams",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
