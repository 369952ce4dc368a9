"""Swap: rows of a block table kept in host memory while they do not run.

Host memory is a second pool under a table of its own, whose row ``request * F + sample`` is a
sample's; blocks that samples share are moved once and shared there, too. These functions decide
which block goes where, and leave that in ``Host.device_ZM`` and ``host_ZM``; whoever owns the bytes
moves them (PagedAttention, section 4.5; all blocks of a request or none).

Cost: O(F * F * M) for a request of F samples; nothing scans either pool.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from paged_jax.memory import block_table
from paged_jax.memory import pool as pools
from paged_jax.memory.block_table import BlockTable
from pallas_kernels import dims


class Host(flax.struct.PyTreeNode):
    """Rows in host memory, and what the last move of each row moved.

    A block is named once, in the first of the rows that share it.
    """

    table: BlockTable  # Z rows over the host's pool
    device_ZM: jax.Array  # i32: device blocks moved from or to, the device's N for none
    host_ZM: jax.Array  # i32: host blocks moved to or from, the host's N for none


def create(device: BlockTable, *, rows: int, blocks: int) -> Host:
    """An empty host side of ``rows`` rows over a pool of ``blocks`` blocks, shaped as ``device``'s.

    Raises ``ValueError`` for sizes below 1.
    """
    cells = device.table_BM.shape[1]
    return Host(
        table=block_table.create(
            rows=rows,
            blocks=blocks,
            block_size=device.block_size,
            blocks_per_row=cells,
            loses_heads=device.first_B is not None,
        ),
        device_ZM=jnp.full((rows, cells), device.pool.none, jnp.int32),
        host_ZM=jnp.full((rows, cells), blocks, jnp.int32),
    )


def blocks(table: BlockTable, row_F: jax.Array) -> jax.Array:
    """Blocks that the rows hold together, each once; rows past the table's end hold none."""
    block_FM, _ = _cells(table, row_F)
    return _leads(block_FM, table.pool.none)[0].sum(dtype=jnp.int32)


def copy_rows(
    source: BlockTable, row_F: jax.Array, target: BlockTable, to_F: jax.Array
) -> tuple[BlockTable, jax.Array, jax.Array]:
    """Empty rows ``to_F`` of another table get a block for each that ``row_F`` hold, shared alike.

    The target's pool has as many free as ``blocks`` counts: the caller has made sure. Rows past a
    table's end are nobody's. Returns ``(target', source_FM, target_FM)``: what is to be copied
    where, N where there is nothing.
    """
    sizes = dims(row_F=row_F, to_F=to_F)
    block_FM, length_F = _cells(source, row_F)
    leads_FM, first_FM = _leads(block_FM, source.pool.none)
    pool, new_Z = pools.take(target.pool, leads_FM.ravel())
    new_FM = new_Z.reshape(leads_FM.shape)
    named_FM = jnp.take_along_axis(new_FM, first_FM, axis=0)
    named_FM = jnp.where(block_FM < source.pool.none, named_FM, pool.none)
    further_FM = jnp.where(first_FM != jnp.arange(sizes.F)[:, None], named_FM, pool.none)
    first_B = target.first_B
    if first_B is not None and source.first_B is not None:
        lost_F = source.first_B.at[row_F].get(mode="fill", fill_value=0)
        first_B = first_B.at[to_F].set(lost_F, mode="drop")
    target = target.replace(
        first_B=first_B,
        pool=pools.hold(pool, further_FM.ravel()),
        table_BM=target.table_BM.at[to_F].set(named_FM, mode="drop"),
        length_B=target.length_B.at[to_F].set(length_F, mode="drop"),
    )
    return target, jnp.where(leads_FM, block_FM, source.pool.none), new_FM


def _cells(table: BlockTable, row_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Table entries and lengths of rows."""
    block_FM = table.table_BM.at[row_F].get(mode="fill", fill_value=table.pool.none)
    return block_FM, table.length_B.at[row_F].get(mode="fill", fill_value=0)


def _leads(block_FM: jax.Array, none: int) -> tuple[jax.Array, jax.Array]:
    """Cells that name a block first, and the row that does so for every cell.

    Rows that share a block have it in the same cell.
    """
    first_FM = jnp.argmax(block_FM[:, None] == block_FM[None], axis=1).astype(jnp.int32)
    row_F = jnp.arange(block_FM.shape[0])
    return (block_FM < none) & (first_FM == row_F[:, None]), first_FM
