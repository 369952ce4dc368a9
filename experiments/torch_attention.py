"""PyTorch's scaled dot-product attention on a contiguous cache of a GPU.

The calls of all sets are captured in one CUDA graph, so that no launch waits for Python, as no
launch of a compiled JAX program does.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

from experiments.attention_inputs import Shape


def sees_gpu() -> bool:
    """Whether PyTorch is installed and finds a GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    return importlib.import_module("torch").cuda.is_available()


def capture_calls(shape: Shape, sets: int) -> tuple[Callable[[], object], float]:
    """A run of one call for each set, and the seconds to warm up and capture it."""
    torch = importlib.import_module("torch")
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(heads: int, tokens: int) -> Any:
        size = (shape.batch, heads, tokens, shape.width)
        options = {"dtype": getattr(torch, shape.dtype), "device": "cuda"}
        return torch.randn(size, generator=generator, **options)

    inputs = [
        (
            draw(shape.query_heads, shape.chunk),
            draw(shape.kv_heads, shape.context),
            draw(shape.kv_heads, shape.context),
        )
        for _ in range(sets)
    ]

    def call() -> None:
        for one in inputs:
            torch.nn.functional.scaled_dot_product_attention(
                *one, is_causal=shape.chunk > 1, enable_gqa=True
            )

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    start = time.perf_counter()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture must not be what sets up a library
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    run()
    return run, time.perf_counter() - start
