"""What does a block table cost on a CPU? The dense attention that paging is measured against.

One decode step over a cache without a table: each row's keys lie one after another and are padded
to the longest row, [B, K, M * S, D], the order in which XLA's products read them straight through.
Two einsums and a softmax, nothing else, so that its time is that of reading the padded cache. Its
time does not depend on the lengths; that of paged attention does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dims import dims


def attend(
    q_BHD: jax.Array, k_BKND: jax.Array, v_BKND: jax.Array, length_B: jax.Array
) -> jax.Array:
    """Attention of one query a row over its first ``length`` slots, [B, H, D]; jit it.

    Rows have at least one token.
    """
    sizes = dims(q_BHD=q_BHD, k_BKND=k_BKND, v_BKND=v_BKND, length_B=length_B)
    q_BKGD = q_BHD.reshape(sizes.B, sizes.K, -1, sizes.D) * sizes.D**-0.5
    logit_BKGN = jnp.einsum("bkgd,bknd->bkgn", q_BKGD, k_BKND)
    seen_BN = jnp.arange(sizes.N) < length_B[:, None]
    weight_BKGN = jax.nn.softmax(jnp.where(seen_BN[:, None, None], logit_BKGN, -jnp.inf), axis=-1)
    return jnp.einsum("bkgn,bknd->bkgd", weight_BKGN, v_BKND).reshape(q_BHD.shape)


def gathered(kv_NUKSD: jax.Array, table_BM: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, K, M * S, D] of a paged cache whose table is in use throughout."""
    rows = jnp.moveaxis(kv_NUKSD[table_BM], 1, 3)  # [B, 2, K, M, S, D]
    shape = (*rows.shape[:3], -1, rows.shape[-1])
    k_v = rows.reshape(shape)
    return k_v[:, 0], k_v[:, 1]
