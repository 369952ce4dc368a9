"""Projections: weights as [outputs, inputs], the order in which every file format has them.

A product with few tokens is bound by how the weights stream past them. On a CPU, rows of weights
against rows of tokens are the faster the more tokens there are, and up to 16 tokens it is faster
still to let the weights be the left side and the tokens columns: of SmolLM2-135M's layers on two
cores, 32 tokens take 54 ms for 63 with weights [inputs, outputs], and 8 tokens 32 ms for 40.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from paged_jax.config import ModelConfig
from pallas_kernels import tiling

COLUMNS = 16  # tokens that a CPU takes as columns, most


class Linear(nnx.Module):
    """``x @ weight.T + bias`` in the config's type, drawn N(0, 0.02) as Llama's and GPT-2's are."""

    def __init__(
        self, inputs: int, outputs: int, config: ModelConfig, *, bias: bool, rngs: nnx.Rngs
    ) -> None:
        draw = nnx.initializers.normal(0.02)
        self.weight = nnx.Param(draw(rngs.params(), (outputs, inputs), config.dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, config.dtype)) if bias else None

    def __call__(self, x_TI: jax.Array) -> jax.Array:
        """Of tokens [T, inputs]: [T, outputs]."""
        out_TO = project(x_TI, self.weight[...])
        return out_TO if self.bias is None else out_TO + self.bias[...]


def project(
    x_TI: jax.Array, weight_OI: jax.Array, out: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """``x @ weight.T`` [T, O], in the type ``out`` or else the arguments'."""
    if len(x_TI) > COLUMNS or tiling.default_device().platform != "cpu":
        return jnp.einsum("ti,oi->to", x_TI, weight_OI, preferred_element_type=out)
    # Left to itself XLA takes both transposes into the product, which is then the one above.
    x_IT = lax.optimization_barrier(x_TI.T)
    out_OT = jnp.matmul(weight_OI, x_IT, preferred_element_type=out)
    return lax.optimization_barrier(out_OT).T
