"""Faults of attention kernels, played on any back end by asking it a wrong question.

``MUTANTS[name](attend, call)`` is what a back end with that fault would answer to ``call``, where
``attend(call)`` is the healthy back end's answer. A check of ``call`` that passes it is a defect.
Calls are ragged or decoding, with a window, and without poison: a mutant reads what it should not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.attention import Call, Result, owners

Attend = Callable[[Call], Result]


def last_block_dropped(attend: Attend, call: Call) -> Result:
    size = call["kv_NUKSD"].shape[3]
    return attend(call | {"length_B": (call["length_B"] - 1) // size * size})


def newest_token_unseen(attend: Attend, call: Call) -> Result:
    return attend(call | {"length_B": call["length_B"] - 1})


def window_one_wider(attend: Attend, call: Call) -> Result:
    return attend(call | {"window": call["window"] + 1})


def scale_a_tenth_higher(attend: Attend, call: Call) -> Result:
    return attend(call | {"scale": 1.1 * call["q_THD"].shape[-1] ** -0.5})


def values_of_another_row(attend: Attend, call: Call) -> Result:
    """V of each row's blocks is that of the next row's."""
    kv_NUKSD, table_BM = call["kv_NUKSD"].copy(), call["table_BM"]
    kv_NUKSD[table_BM, 1] = call["kv_NUKSD"][np.roll(table_BM, -1, axis=0), 1]
    return attend(call | {"kv_NUKSD": kv_NUKSD})


def values_from_keys(attend: Attend, call: Call) -> Result:
    kv_NUKSD = call["kv_NUKSD"].copy()
    kv_NUKSD[:, 1] = kv_NUKSD[:, 0]
    return attend(call | {"kv_NUKSD": kv_NUKSD})


def causal_off_by_one(attend: Attend, call: Call) -> Result:
    """No query sees its own token: a row has one query more at its end, answers to it are lost."""
    tokens = len(call["q_THD"])
    rows = owners(tokens, call.get("query_start_P"))
    starts_P = np.array([first + row for row, (first, _) in enumerate([*rows, (rows[-1][1], 0)])])
    moved_T = np.concatenate(
        [np.arange(first, last) + row for row, (first, last) in enumerate(rows)]
    )
    q_THD = np.zeros((tokens + len(rows), *call["q_THD"].shape[1:]), call["q_THD"].dtype)
    q_THD[moved_T] = call["q_THD"][: len(moved_T)]
    late = attend(call | {"q_THD": q_THD, "query_start_P": starts_P.astype(np.int32)})
    out_THD, lse_TH = np.zeros(call["q_THD"].shape), np.full(call["q_THD"].shape[:2], -np.inf)
    out_THD[: len(moved_T)], lse_TH[: len(moved_T)] = late[0][moved_T], late[1][moved_T]
    return out_THD, lse_TH


def table_ignored(attend: Attend, call: Call) -> Result:
    """Blocks are taken as if they lay in order."""
    table_BM = np.arange(call["table_BM"].size, dtype=np.int32).reshape(call["table_BM"].shape)
    return attend(call | {"table_BM": table_BM % len(call["kv_NUKSD"])})


def length_ignored(attend: Attend, call: Call) -> Result:
    """Rows are as long as their table."""
    longest = call["table_BM"].shape[1] * call["kv_NUKSD"].shape[3]
    return attend(call | {"length_B": np.full_like(call["length_B"], longest)})


MUTANTS = {
    mutant.__name__: mutant
    for mutant in (
        last_block_dropped,
        newest_token_unseen,
        window_one_wider,
        scale_a_tenth_higher,
        values_of_another_row,
        values_from_keys,
        causal_off_by_one,
        table_ignored,
        length_ignored,
    )
}
