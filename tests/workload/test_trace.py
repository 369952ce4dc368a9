"""Readers: every format from a written file, every refusal, and the published files."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paged_jax.workload import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
MOONCAKE = '{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}'
TOKENS = (
    '{"input_toks": %d, "output_toks": %d, "arrival_time_ns": %d, "input_tok_ids": %s,'
    ' "output_tok_ids": %s}'
)
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(*lines: str, end: str = "\n", last: str | None = None) -> str:
        path = tmp_path / "file"  # no suffix: the format must come from the content
        path.write_bytes((end.join(lines) + (end if last is None else last)).encode())
        return str(path)

    return written


def test_azure(write: Write) -> None:
    rows = ("2023-11-16 23:59:59.6805900,374,44", "2023-11-17 00:00:00.0000001,3,9")
    trace = read_trace(write(AZURE, *rows, end="\r\n", last=""))
    assert trace.format == "azure"
    assert trace.prompt_R.tolist() == [374, 3]
    assert trace.output_R.tolist() == [44, 9]
    assert trace.arrival_seconds_R is not None
    assert trace.arrival_seconds_R.tolist() == [0, 0.3194101]  # the seventh digit counts
    assert trace.arrival_steps_R is None
    assert trace.ids is None


def test_azure_with_zones(write: Write) -> None:
    rows = ("2024-05-10 00:00:00+00:00,1,1", "2024-05-10 02:00:00.5+01:30,1,1")
    trace = read_trace(write(AZURE, *rows))
    assert trace.arrival_seconds_R is not None
    assert trace.arrival_seconds_R.tolist() == [0, 1800.5]


def test_mooncake(write: Write) -> None:
    rows = MOONCAKE % (0, 600, 5, [7, 8]), MOONCAKE % (1500, 512, 1, [7])
    trace = read_trace(write(*rows))
    assert trace.format == "mooncake"
    assert trace.prompt_R.tolist() == [600, 512]
    assert trace.output_R.tolist() == [5, 1]
    assert trace.arrival_seconds_R is not None
    assert trace.arrival_seconds_R.tolist() == [0, 1.5]
    assert trace.ids_tokens == 512
    assert trace.ids is not None
    assert [trace.ids.row(0).tolist(), trace.ids.row(1).tolist()] == [[7, 8], [7]]


@pytest.mark.parametrize(
    "header",
    [
        "num_prefill_tokens,num_decode_tokens,num_total_tokens",
        "prompt_len,output_len,note",
        "prompt_tokens,output_tokens,source",
    ],
)
def test_lengths(write: Write, header: str) -> None:
    trace = read_trace(write(header, "3,4,7", '5,6,"a, quoted"'))
    assert trace.format == "lengths"
    assert trace.prompt_R.tolist() == [3, 5]
    assert trace.output_R.tolist() == [4, 6]
    assert trace.arrival_seconds_R is None


def test_replay(write: Write) -> None:
    trace = read_trace(write("arrival_iter,prompt_len,output_len", "0,3,4", "9,5,6", end="\r\n"))
    assert trace.format == "replay"
    assert trace.arrival_steps_R is not None
    assert trace.arrival_steps_R.tolist() == [0, 9]
    assert trace.arrival_seconds_R is None


def test_token_ids(write: Write) -> None:
    trace = read_trace(write(TOKENS % (2, 1, 5 * 10**8, [10, 11], [12])))
    assert trace.format == "token ids"
    assert trace.arrival_seconds_R is not None
    assert trace.arrival_seconds_R.tolist() == [0.5]
    assert trace.prompt_ids is not None
    assert trace.prompt_ids.row(0).tolist() == [10, 11]
    assert trace.output_ids is not None
    assert trace.output_ids.row(0).tolist() == [12]


def test_gzip_and_byte_order_mark(write: Write, tmp_path: Path) -> None:
    path = write("\ufeffprompt_len,output_len", "3,4")
    assert read_trace(path).prompt_R.tolist() == [3]
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert read_trace(str(packed)).prompt_R.tolist() == [3]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ValueError, match="packed: expected a whole gzip file"):
        read_trace(str(packed))


REPLAY = "arrival_iter,prompt_len,output_len"
LENGTHS = "prompt_len,output_len"
WHOLE = "expected a whole number from 1 to 2147483647"
REFUSALS = [
    ([""], ":1: expected a CSV header or a JSON object, got an empty file"),
    (["a,b", "1,2"], ":1: expected the columns of a known format (TIMESTAMP,ContextTokens"),
    (["prompt_len", "1"], ", got 'prompt_len'"),
    ([LENGTHS], ":2: expected a request, got the end of the file"),
    ([LENGTHS, "3,4", "5"], ":3: column output_len: expected a value, got the end of the line"),
    ([LENGTHS, "3,4", "5,"], f":3: column output_len: {WHOLE}, got ''"),
    ([LENGTHS, "3,4", "", "5,6"], ":3: column prompt_len: expected a value, got ''"),
    ([LENGTHS, "3,4,5"], ":2: expected 2 columns, got '3'"),
    ([LENGTHS, '3,"4'], ":2: expected CSV, got: "),
    (["prompt_len,output_len,output_len", "3,4,5"], ":1: expected different column names"),
    ([LENGTHS, "3,0"], f":2: column output_len: {WHOLE}, got '0'"),
    ([LENGTHS, "-3,1"], f":2: column prompt_len: {WHOLE}, got '-3'"),
    ([LENGTHS, "3.0,1"], f":2: column prompt_len: {WHOLE}, got '3.0'"),
    ([LENGTHS, "1_0,1"], f":2: column prompt_len: {WHOLE}, got '1_0'"),
    ([LENGTHS, "٣,1"], f":2: column prompt_len: {WHOLE}, got '٣'"),
    ([LENGTHS, "2147483648,1"], f":2: column prompt_len: {WHOLE}, got '2147483648'"),
    ([LENGTHS, "9" * 80 + ",1"], f":2: column prompt_len: {WHOLE}, got '999"),
    (
        [REPLAY, "4,1,1", "3,1,1"],
        ":3: column arrival_iter: expected arrivals in order, not before '4', got '3'",
    ),
    ([REPLAY, "-1,1,1"], ":2: column arrival_iter: expected a whole number from 0"),
    ([AZURE, "yesterday,1,1"], ":2: column TIMESTAMP: expected a time like 2023-11-16"),
    ([AZURE, "2023-02-30 00:00:00,1,1"], ":2: column TIMESTAMP: expected a time like"),
    ([AZURE, "1969-12-31 23:59:59,1,1"], ":2: column TIMESTAMP: expected a time like"),
    ([AZURE, "2023-11-16 18:15:46,1,1", "9999-12-31 00:00:00,1,1"], ":3: column TIMESTAMP: "),
    (
        [AZURE, "2023-11-16 18:15:46.2,1,1", "2023-11-16 18:15:46.1,1,1"],
        ":3: column TIMESTAMP: expected arrivals in order",
    ),
    ([MOONCAKE % (0, 5, 5, [1]), '{"timestamp": 3, "inp'], ":2: expected a whole JSON object, got"),
    ([MOONCAKE % (0, 5, 5, [1]), "[]"], ":2: expected a whole JSON object, got '[]'"),
    (["{" + '"a":[' * 9999], ":1: expected a whole JSON object"),
    (['{"timestamp": 0}'], ":1: expected the columns of a known format"),
    (
        [MOONCAKE % (0, 5, 5, [1]), '{"timestamp": 0, "input_length": 1, "output_length": 1}'],
        ":2: column hash_ids: expected a value, got no such key",
    ),
    (
        [MOONCAKE % (0, 513, 5, [1])],
        ":1: column hash_ids: expected 2 ids for 513 tokens, got '1 ids'",
    ),
    ([MOONCAKE % (0, 5, 5, '["1"]')], ":1: column hash_ids: expected a list of whole numbers"),
    ([MOONCAKE % (0, 5, 5, 1)], ":1: column hash_ids: expected a list of whole numbers"),
    ([MOONCAKE % (0, 0, 5, [])], f":1: column input_length: {WHOLE}, got 0"),
    ([(MOONCAKE % (0, 5, 5, [1])).replace("5", "true")], ":1: column input_length: "),
    ([(MOONCAKE % (0, 5, 5, [1])).replace("5", '"5"')], f"{WHOLE}, got '5'"),
    (
        [MOONCAKE % (9, 5, 5, [1]), MOONCAKE % (8, 5, 5, [1])],
        ":2: column timestamp: expected arriv",
    ),
    (
        [MOONCAKE % (0, 600, 5, [1, 2]), MOONCAKE % (0, 600, 5, [3, 2])],
        ":2: column hash_ids: expected an id to follow the same ids as on line 1, got 2",
    ),
    ([MOONCAKE % (0, 600, 5, [1, 1])], ":1: column hash_ids: expected an id to follow the same"),
    (
        [TOKENS % (2, 1, 0, [10], [12])],
        ":1: column input_tok_ids: expected 2 ids, as input_toks says, got '1 ids'",
    ),
]


@pytest.mark.parametrize(("lines", "message"), REFUSALS)
def test_malformed_file_is_refused_in_one_line(
    write: Write, lines: list[str], message: str
) -> None:
    path = write(*lines)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_trace(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"prompt_len,output_len\n3,\xff\n")
    with pytest.raises(ValueError, match="expected UTF-8 text, got byte 24"):
        read_trace(str(path))


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"),
    [
        ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", 19_366, (1155, 14_050), (211, 1000)),
        ("mooncake_fast25/conversation_trace.jsonl", 12_031, (12_035, 126_195), (343, 2000)),
        ("sharegpt_tokens/sharegpt-llama-3.1-8b-300-sps10.jsonl", 300, (857, 3998), (653, 1021)),
        (
            "lengths_only/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
            30_731,
            (2340, None),
            (439, None),
        ),
        (
            "lengths_only/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
            28_257,
            (2588, None),
            (291, None),
        ),
        (
            "alpaca_style_lengths/alpaca_style_lengths_llama2_tokenizer.csv",
            1979,
            (33, None),
            (126, None),
        ),
        ("replay/alpaca_10000_poisson.csv", 10_000, (19, None), (58, None)),
        ("replay/sharegpt_2000_backlog.csv", 2000, (161, 2047), (338, 2041)),
    ],
)
def test_published_file(
    shared_data: Callable[[str], Path],
    name: str,
    requests: int,
    prompt: tuple[int, int | None],
    output: tuple[int, int | None],
) -> None:
    path = shared_data(name)
    start = time.process_time()
    trace = read_trace(str(path))
    assert time.process_time() - start < 2  # measured: below 0.2 s each
    assert trace.count == requests
    for (mean, most), length_R in ((prompt, trace.prompt_R), (output, trace.output_R)):
        assert round(length_R.mean()) == mean
        assert most in (None, length_R.max())


def test_azure_arrivals_are_those_published(shared_data: Callable[[str], Path]) -> None:
    trace = read_trace(str(shared_data("azure_llm_2023/AzureLLMInferenceTrace_conv.csv")))
    assert trace.arrival_seconds_R is not None
    gaps = np.diff(trace.arrival_seconds_R)
    assert round(trace.arrival_seconds_R[-1]) == 3502
    assert gaps.std() / gaps.mean() == pytest.approx(1.09, abs=0.005)
