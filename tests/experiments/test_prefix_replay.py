"""A trace's hit rates against plain Python, and against what is published of a real trace."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from experiments import prefix_replay
from paged_jax.measure import results
from tests.support.commands import call, one_line
from tests.support.prefix_lists import PrefixLists

IDS_TOKENS = 512  # of the format


def write_trace(path: Path, requests: int) -> list[list[int]]:
    """Conversations that go on and branch. Returns the ids of each request's full blocks."""
    rng = random.Random(0)
    chains: list[list[int]] = [[0]]
    full, lines, fresh = [], [], 1
    for second in range(requests):
        chain = list(rng.choice(chains[-8:]))[: rng.randint(1, 6)]
        for _ in range(rng.randint(0, 2)):
            chain.append(fresh)
            fresh += 1
        chains.append(chain)
        tokens = len(chain) * IDS_TOKENS - rng.choice([0, 0, 1, 500])
        keys = ("timestamp", "input_length", "output_length", "hash_ids")
        values = (1000 * second, tokens, 9, chain)
        lines.append(json.dumps(dict(zip(keys, values, strict=True))))
        full.append([*chain[: tokens // IDS_TOKENS], *[-1] * (tokens % IDS_TOKENS > 0)])
    path.write_text("\n".join(lines) + "\n")
    return full


def expected_hits(requests: list[list[int]], blocks: int) -> list[int]:
    """One token stands for a full block; a last one that is its own for a partial block."""
    lists = PrefixLists(rows=1, blocks=blocks, block_size=1, blocks_per_row=99)
    hits = []
    for request in requests:
        found = lists.admit(0, request, 0)
        assert found is not None
        lists.register(0, len(request) - (request[-1] == -1), 0)
        lists.release({0})
        hits.append(found)
    return hits


def test_rates_equal_plain_python(tmp_path):
    requests = write_trace(tmp_path / "trace.jsonl", 60)
    out = tmp_path / "out"
    done = call(
        prefix_replay, f"--trace={tmp_path / 'trace.jsonl'}", "--blocks=0,12", f"--out={out}"
    )
    assert done.code == 0, done.err
    rows = results.read(out)
    rates = {row["blocks"]: row["value"] for row in rows if row["metric"] == "block_hit_rate"}
    for blocks in (0, 12):
        hits = expected_hits(requests, blocks or 999)
        assert rates[str(blocks)] == pytest.approx(sum(hits) / sum(map(len, requests)))
    assert rates["12"] < rates["0"]
    assert done.out.count("requests/s\n") == 2
    again = call(prefix_replay, f"--trace={tmp_path / 'trace.jsonl'}", f"--out={out}")
    one_line(again, out / "rows.csv", "exists")


def test_what_cannot_be_replayed_is_refused(tmp_path):
    write_trace(tmp_path / "trace.jsonl", 5)
    trace, out = f"--trace={tmp_path / 'trace.jsonl'}", f"--out={tmp_path / 'out'}"
    one_line(call(prefix_replay, trace, out, "--blocks=1"), "--blocks", "longest prompt", "got 1")
    one_line(call(prefix_replay, trace, out, "--blocks=-3"), "--blocks", "got -3")
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_len,output_len\n3,4\n")
    one_line(call(prefix_replay, f"--trace={lengths}", out), "prefix ids", "lengths")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_mooncake_conversation_trace(shared_data, tmp_path):
    """Rates of a cache without an end, and the LRU block hit rates of the trace's provenance."""
    trace = shared_data("mooncake_fast25") / "conversation_trace.jsonl"
    out = tmp_path / "out"
    done = call(prefix_replay, f"--trace={trace}", "--blocks=0,10000,50000", f"--out={out}")
    assert done.code == 0, done.err
    rates = {(row["blocks"], row["metric"]): row["value"] for row in results.read(out)}
    for metric, percent in (("block", 36.60), ("token", 37.34), ("request", 40.78)):
        assert 100 * rates["0", f"{metric}_hit_rate"] == pytest.approx(percent, abs=0.02)
    assert rates["10000", "block_hit_rate"] == pytest.approx(0.212, abs=0.005)
    assert rates["50000", "block_hit_rate"] == pytest.approx(0.355, abs=0.005)
