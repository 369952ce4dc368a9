"""Request traces: one reader for six published formats, told apart by header or keys.

================= ================================================================== ===========
format            columns or keys                                                    arrivals
================= ================================================================== ===========
azure             TIMESTAMP, ContextTokens, GeneratedTokens (Patel et al., ISCA 2024) seconds
mooncake          timestamp, input_length, output_length, hash_ids (Qin et al., FAST  seconds
                  2025; an id stands for 512 tokens and all before them)
replay            arrival_iter, prompt_len, output_len                                steps
lengths           num_prefill_tokens, num_decode_tokens, or prompt_len, output_len,   none
                  or prompt_tokens, output_tokens
token ids         input_toks, output_toks, arrival_time_ns, input_tok_ids,            seconds
                  output_tok_ids
servegen          client distributions, not requests: see the module ``servegen``
================= ================================================================== ===========

Further columns are allowed. Requests must stand in the order of their arrival, and a malformed
file is refused as a whole (see ``columns``). Cost: about a second for 12,000 rows with 290,000 ids.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable

import numpy as np

from paged_jax.workload import columns, ragged
from pallas_kernels import dims

MOONCAKE_IDS_TOKENS = 512
MOST_SECONDS = 2**63 // 10**9  # since 1970, whose nanoseconds fit 64 bits
_EPOCH = datetime.datetime(1970, 1, 1)
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))?", re.ASCII
)
_LENGTHS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("prompt_len", "output_len"),
    ("prompt_tokens", "output_tokens"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """R requests in the order of their arrival; what a format does not tell is None.

    Prefix ids name the tokens of a prompt, ``ids_tokens`` an id, the last id for what is left. An
    id covers its tokens and all before them: equal ids mean equal prompts up to there.
    """

    format: str
    prompt_R: np.ndarray
    output_R: np.ndarray
    arrival_seconds_R: np.ndarray | None = None  # float64
    arrival_steps_R: np.ndarray | None = None
    ids: ragged.Ragged | None = None
    ids_tokens: int | None = None
    prompt_ids: ragged.Ragged | None = None  # token ids
    output_ids: ragged.Ragged | None = None

    def __post_init__(self) -> None:
        dims(prompt_R=self.prompt_R, output_R=self.output_R)
        if (self.ids is None) != (self.ids_tokens is None):
            raise ValueError(f"ids_tokens: expected with ids and only so, got {self.ids_tokens}")

    @property
    def count(self) -> int:
        """R, the number of requests."""
        return len(self.prompt_R)


def read_trace(path: str) -> Trace:
    """The requests of a file in any of the formats above.

    Raises ``ValueError`` (``FILE:LINE: column NAME: expected WHAT, got VALUE``) for a file that is
    none of them, or breaks its format anywhere; ``OSError`` when it cannot be opened.
    """
    text = columns.read_text(path)
    first = text[: text.find("\n")] if "\n" in text else text
    if first.lstrip().startswith("{"):
        keys = set(columns.json_object(path, 1, first))
        for names, read in _JSON_READERS.items():
            if keys >= set(names):
                return read(columns.json_table(path, text, names))
    else:
        keys = set(first.strip().split(","))
        for names, read in _CSV_READERS.items():
            if keys >= set(names):
                return read(columns.csv_table(path, text))
    known = "; ".join(",".join(names) for names in (*_CSV_READERS, *_JSON_READERS))
    known += "; ServeGen clients are distributions, which servegen.sample turns into a trace"
    columns.refuse(path, 1, "", f"the columns of a known format ({known})", first.strip())


def _azure(table: columns.Table) -> Trace:
    stamps = table.columns["TIMESTAMP"]
    expected = "a time like 2023-11-16 18:15:46.6805900, from 1970 to 2261"
    nanoseconds_R = np.empty(len(stamps), np.int64)
    for index, stamp in enumerate(stamps):
        nanoseconds = _nanoseconds(str(stamp))
        if nanoseconds is None:
            table.refuse("TIMESTAMP", index, expected)
        nanoseconds_R[index] = nanoseconds
    table.demand_order("TIMESTAMP", nanoseconds_R)
    return Trace(
        format="azure",
        prompt_R=table.integers("ContextTokens"),
        output_R=table.integers("GeneratedTokens"),
        arrival_seconds_R=(nanoseconds_R - nanoseconds_R[0]) / 1e9,
    )


def _nanoseconds(stamp: str) -> int | None:
    """Since 1970, exact: ``datetime`` would drop the seventh digit of the fraction."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return None
    seconds, fraction, sign, hours, minutes = match.groups()
    try:
        elapsed = datetime.datetime.fromisoformat(seconds) - _EPOCH
    except ValueError:
        return None
    whole = elapsed.days * 86_400 + elapsed.seconds
    if sign:
        whole -= int(f"{sign}1") * (int(hours) * 3600 + int(minutes) * 60)
    if not 0 <= whole < MOST_SECONDS:
        return None
    return whole * 10**9 + int((fraction or "0").ljust(9, "0"))


def _mooncake(table: columns.Table) -> Trace:
    prompt_R = table.integers("input_length")
    output_R = table.integers("output_length")
    milliseconds_R = table.integers("timestamp", least=0, most=2**53)
    table.demand_order("timestamp", milliseconds_R)
    ids = table.lists("hash_ids")
    wanted_R = -(-prompt_R // MOONCAKE_IDS_TOKENS)
    wrong_R = ids.count_R != wanted_R
    if wrong_R.any():
        index = int(np.argmax(wrong_R))
        what = f"{wanted_R[index]} ids for {prompt_R[index]} tokens"
        columns.refuse(
            table.path, table.lines[index], "hash_ids", what, f"{ids.count_R[index]} ids"
        )
    _demand_chain(table, ids)
    return Trace(
        format="mooncake",
        prompt_R=prompt_R,
        output_R=output_R,
        arrival_seconds_R=milliseconds_R / 1e3,
        ids=ids,
        ids_tokens=MOONCAKE_IDS_TOKENS,
    )


def _demand_chain(table: columns.Table, ids: ragged.Ragged) -> None:
    """An id covers all before it, so it stands in one place, behind one id, wherever it occurs."""
    _, first_V, inverse_T = np.unique(ids.values_T, return_index=True, return_inverse=True)
    position_T = ids.position_T
    before_T = np.where(position_T > 0, np.roll(ids.values_T, 1), -1)
    first_T = first_V[inverse_T]
    breach_T = (position_T != position_T[first_T]) | (before_T != before_T[first_T])
    if breach_T.any():
        place = int(np.argmax(breach_T))
        line = table.lines[int(ids.row_T[first_T[place]])]
        columns.refuse(
            table.path,
            table.lines[int(ids.row_T[place])],
            "hash_ids",
            f"an id to follow the same ids as on line {line}",
            int(ids.values_T[place]),
        )


def _replay(table: columns.Table) -> Trace:
    step_R = table.integers("arrival_iter", least=0)
    table.demand_order("arrival_iter", step_R)
    return Trace(
        format="replay",
        prompt_R=table.integers("prompt_len"),
        output_R=table.integers("output_len"),
        arrival_steps_R=step_R,
    )


def _token_ids(table: columns.Table) -> Trace:
    lengths, packed = {}, {}
    for count_name, ids_name in (
        ("input_toks", "input_tok_ids"),
        ("output_toks", "output_tok_ids"),
    ):
        lengths[count_name] = table.integers(count_name)
        packed[ids_name] = table.lists(ids_name)
        wrong_R = packed[ids_name].count_R != lengths[count_name]
        if wrong_R.any():
            index = int(np.argmax(wrong_R))
            counts = lengths[count_name][index], packed[ids_name].count_R[index]
            what = f"{counts[0]} ids, as {count_name} says"
            columns.refuse(table.path, table.lines[index], ids_name, what, f"{counts[1]} ids")
    nanoseconds_R = table.integers("arrival_time_ns", least=0, most=2**63 - 1)
    table.demand_order("arrival_time_ns", nanoseconds_R)
    return Trace(
        format="token ids",
        prompt_R=lengths["input_toks"],
        output_R=lengths["output_toks"],
        arrival_seconds_R=nanoseconds_R / 1e9,
        prompt_ids=packed["input_tok_ids"],
        output_ids=packed["output_tok_ids"],
    )


def _lengths(prompt: str, output: str) -> Callable[[columns.Table], Trace]:
    def read(table: columns.Table) -> Trace:
        return Trace(
            format="lengths", prompt_R=table.integers(prompt), output_R=table.integers(output)
        )

    return read


_Readers = dict[tuple[str, ...], Callable[[columns.Table], Trace]]
_CSV_READERS: _Readers = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("arrival_iter", "prompt_len", "output_len"): _replay,  # before lengths: it has more columns
    **{names: _lengths(*names) for names in _LENGTHS},
}
_JSON_READERS: _Readers = {
    ("timestamp", "input_length", "output_length", "hash_ids"): _mooncake,
    ("input_toks", "output_toks", "arrival_time_ns", "input_tok_ids", "output_tok_ids"): _token_ids,
}
