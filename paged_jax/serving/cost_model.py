"""Virtual time: the seconds a step takes on a device, from what it reads and what it computes.

    seconds = max(bytes / bandwidth, flops / peak) + launch + swapped bytes / host link

the roofline (Williams et al., CACM 2009) of one step: all weights and the step's cache are read
once, every token passes through every matrix. Peaks are data sheets' times a fitted efficiency
(``experiments.calibrate``). Activations are left out: a step of T tokens moves a few T x width a
layer, little beside weights of width x width where T is small, and hidden behind the matrices where
it is large. Transfers to the host are taken not to overlap with the step.

All functions are arithmetic on Python numbers, NumPy or JAX arrays, traced or not.
"""

from __future__ import annotations

import collections

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import KV_DTYPES, DeviceConfig, ModelConfig
from paged_jax.memory import cache_groups, kv_cache
from pallas_kernels import dims

Count = int | float | np.ndarray | jax.Array


class StepCounts(flax.struct.PyTreeNode):
    """What a step does; numbers, or arrays of one shape for many steps.

    Tokens of a windowed model are means over its layers. A block that rows share counts for each
    of them: attention reads it once a row.
    """

    query_tokens: Count  # that pass through the layers; 0: there is no step
    drawing_rows: Count  # tokens that logits are computed for
    context_tokens: Count  # that attention reads: over rows, the row's own new ones among them
    attended_tokens: Count  # that attention computes: over queries, the tokens each one sees
    swapped_slots: Count = 0  # blocks that move to or from the host times their size


def count_step(
    model: ModelConfig, length_B: jax.Array, queries_B: jax.Array, drawing_B: jax.Array
) -> StepCounts:
    """Counts of a step in which each row's last ``queries_B`` of its ``length_B`` tokens are new.

    ``drawing_B`` marks rows that logits are computed for. Counts of tokens are f32: their sum over
    a batch of long prompts passes 32 bits.
    """
    dims(length_B=length_B, queries_B=queries_B, drawing_B=drawing_B)
    length, queries = length_B.astype(jnp.float32), queries_B.astype(jnp.float32)
    context = attended = jnp.float32(0)
    for window, layers in collections.Counter(map(model.window, range(model.layers))).items():
        most = jnp.inf if window is None else float(window)
        # A sum of the visible lengths first..length, each at most the window. Not a difference of
        # two sums from 1: in f32 that loses a decoding row's few thousand among millions.
        growing = jnp.clip(most - (length - queries), 0, queries)
        seen = growing * (length - queries) + growing * (growing + 1) / 2
        seen += (queries - growing) * jnp.minimum(most, length)
        read = jnp.where(queries > 0, jnp.minimum(length, most + queries - 1), 0)
        context += read.sum() * (layers / model.layers)
        attended += seen.sum() * (layers / model.layers)
    return StepCounts(
        query_tokens=queries_B.sum(),
        drawing_rows=drawing_B.sum(),
        context_tokens=context,
        attended_tokens=attended,
    )


def parameters(model: ModelConfig) -> int:
    """Weights of a decoder: embedding, layers, final norm, and the head unless it is tied.

    With E width, H and K heads of D, M the MLP's width, V the vocabulary and L layers:
    V E (twice unless tied) + E + L (E D (2 H + 2 K) + 3 E M + norms and biases), where a layer has
    2 E (4 E with ``post_norms``) + 2 D (``qk_norm``) of norms and (H + 2 K) D + E + 2 M + E of
    biases, each group where the config asks for it.
    """
    heads_width = (model.query_heads + 2 * model.kv_heads) * model.head_width
    norms = (4 if model.post_norms else 2) * model.width + 2 * model.head_width * model.qk_norm
    biases = (
        model.qkv_bias * heads_width
        + model.output_bias * model.width
        + model.mlp_bias * (2 * model.mlp_width + model.width)
    )
    embeddings = model.vocabulary * model.width * (1 if model.tied_embedding else 2)
    return embeddings + model.width + model.layers * (_layer_matrices(model) + norms + biases)


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of a decoder's weights."""
    return parameters(model) * jnp.dtype(model.dtype).itemsize


def slot_bytes(model: ModelConfig, kv_dtype: str = "auto") -> int:
    """Bytes of one token in all layers of a cache, scales included. ``auto``: the model's type."""
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"kv_dtype: expected one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}")
    dtype = jnp.dtype(model.dtype if kv_dtype == "auto" else kv_cache.DTYPES[kv_dtype])
    scale = 4 if kv_dtype in kv_cache.QUANTISED else 0
    return model.layers * 2 * model.kv_heads * (model.head_width * dtype.itemsize + scale)


def pool_slots(
    model: ModelConfig, device: DeviceConfig, *, fraction: float = 0.9, kv_dtype: str = "auto"
) -> int:
    """Slots of the cache that fits into ``fraction`` of the device's memory beside the weights.

    A slot is room for a token in the layers of one cache group. The rest of the memory is for
    activations and the runtime. Raises ``ValueError`` where the weights leave no slot.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction: expected above 0 to 1, got {fraction}")
    room = int(device.memory_bytes * fraction)
    groups = cache_groups.by_window(model).count
    slots = groups * (room - weight_bytes(model)) // slot_bytes(model, kv_dtype)
    if slots < 1:
        raise ValueError(
            f"device: {fraction} of {device.name}'s memory is {room / 1e9:.1f} GB, the weights"
            f" alone take {weight_bytes(model) / 1e9:.1f} GB"
        )
    return slots


def step_bytes(model: ModelConfig, counts: StepCounts, kv_dtype: str = "auto") -> Count:
    """Bytes of device memory that a step reads and writes: weights once, and its cache.

    An embedding that is no output head, too, is left out: of it a step gathers a few rows.
    """
    gathered = 0 if model.tied_embedding else model.vocabulary * model.width
    weights = float((parameters(model) - gathered) * jnp.dtype(model.dtype).itemsize)
    # Floats: whole numbers of traced counts would wrap at 32 bits.
    return weights + (counts.context_tokens + counts.query_tokens) * float(
        slot_bytes(model, kv_dtype)
    )


def step_flops(model: ModelConfig, counts: StepCounts) -> Count:
    """Multiplications and additions of a step: matrices, attention, output head.

    Two a weight and token; attention four a query head, channel and attended token of a layer
    (scores, then values).
    """
    layers = float(2 * model.layers * _layer_matrices(model))
    attention = float(4 * model.layers * model.query_heads * model.head_width)
    head = float(2 * model.vocabulary * model.width)
    return (
        counts.query_tokens * layers
        + counts.attended_tokens * attention
        + counts.drawing_rows * head
    )


def step_seconds(
    model: ModelConfig, device: DeviceConfig, counts: StepCounts, kv_dtype: str = "auto"
) -> jax.Array:
    """Seconds of a step, f32; 0 where nothing passes through the layers and nothing is swapped.

    Add many of them up in more than f32, or in parts: after an hour one f32 step is 0.2 ms.
    """
    memory = step_bytes(model, counts, kv_dtype) / (
        device.memory_bandwidth * device.bandwidth_efficiency
    )
    compute = step_flops(model, counts) / (device.flops * device.flops_efficiency)
    forward = jnp.maximum(memory, compute) + device.launch_seconds
    swapped = counts.swapped_slots * float(slot_bytes(model, kv_dtype))
    forward = jnp.where(jnp.asarray(counts.query_tokens) > 0, forward, 0.0)
    return forward + swapped / device.host_bandwidth


def _layer_matrices(model: ModelConfig) -> int:
    """Weights of a layer's matrices."""
    projections = 2 * (model.query_heads + model.kv_heads) * model.head_width
    return model.width * (projections + 3 * model.mlp_width)
