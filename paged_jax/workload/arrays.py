"""Requests on the device: the constants of a compiled simulation, padded to a bucket's size.

Padding lets one compiled program serve workloads of different length: ``count`` says how many of
the R requests are real.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged_jax.workload.requests import Requests


class RequestArrays(flax.struct.PyTreeNode):
    """``Requests`` as traced arrays; sequence r * F + f is sample f of request r."""

    prompt_R: jax.Array
    output_Y: jax.Array
    arrival_R: jax.Array
    prefix_R: jax.Array
    prefix_tokens_X: jax.Array  # 0 for a prefix that no request begins with
    donor_R: jax.Array
    shared_R: jax.Array
    count: jax.Array
    samples: int = flax.struct.field(pytree_node=False)
    has_donors: bool = flax.struct.field(pytree_node=False)

    def outputs(self, request: jax.Array) -> jax.Array:
        """Output tokens of each sample of a request, [F]."""
        return lax.dynamic_slice_in_dim(self.output_Y, request * self.samples, self.samples)

    @property
    def bound(self) -> int:
        """R, real requests and padding."""
        return self.prompt_R.shape[0]


def put(requests: Requests, bound: int | None = None) -> RequestArrays:
    """``requests`` as device arrays of ``bound`` requests, by default of as many as there are."""
    bound = requests.count if bound is None else bound
    if bound < requests.count:
        raise ValueError(f"bound: expected at least {requests.count} requests, got {bound}")

    def pad(array: np.ndarray, fill: int) -> jax.Array:
        widths = [(0, bound - requests.count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.asarray(np.pad(array, widths, constant_values=fill))

    used_X = np.isin(np.arange(len(requests.prefix_tokens_X)), requests.prefix_R)
    return RequestArrays(
        prompt_R=pad(requests.prompt_R, 1),
        output_Y=pad(requests.output_RF, 1).ravel(),
        arrival_R=pad(requests.arrival_R, 0),
        prefix_R=pad(requests.prefix_R, len(requests.prefix_tokens_X)),
        prefix_tokens_X=jnp.where(used_X, requests.prefix_tokens_X, 0),
        donor_R=pad(requests.donor_R, 0),
        shared_R=pad(requests.shared_R, 0),
        count=jnp.int32(requests.count),
        samples=requests.samples,
        has_donors=bool((requests.shared_R > 0).any()),
    )
