"""``experiments.serve_bench``: what is timed, and what counts as useful."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from pathlib import Path

import pytest

from experiments import generate, serve_bench
from paged_jax.measure import results
from paged_jax.serving.llm import LLM
from tests.support import models
from tests.support.commands import call, one_line
from tests.support.models import TINY

run = functools.partial(call, serve_bench)

# Answers at once, with tokens that no model draws: of each prompt as many as are asked for.
PEER = """#!{python}
import json, sys
print(json.dumps({{"peer": "a list"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    with open({log!r}, "a") as log:
        print(len(asked["prompts"]), asked["tokens"], file=log)
    ids = [[-1] * asked["tokens"] for _ in asked["prompts"]]
    print(json.dumps({{"seconds": 2.0, "token_ids": ids}}), flush=True)
"""
SMALL = (
    *("--block_size=4", "--pool_slots=64", "--max_length=32", "--rows=4", "--step_tokens=8"),
    *("--requests=5", "--shortest=3", "--longest=8", "--dispatch_steps=4"),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--model`` is a model of one layer and 61 tokens, whatever it says."""
    shape = dataclasses.replace(TINY, layers=1)
    loaded = models.Loaded(config=shape, decoder=models.random_decoder(shape), end_ids=())
    monkeypatch.setattr(
        generate,
        "load_model",
        lambda: LLM(loaded, **dataclasses.asdict(generate.engine_config())),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_three_systems_take_turns(tmp_path: Path) -> None:
    peer, log, out = tmp_path / "peer", tmp_path / "log", tmp_path / "out"
    peer.write_text(PEER.format(python=sys.executable, log=str(log)))
    peer.chmod(0o755)
    done = run("--model=x", *SMALL, f"--peer_python={peer}", f"--out={out}", "--repeats=3")
    assert done.code == 0, done.err
    rows = results.read(out)
    turns = [(row["system"], row["repeat"]) for row in rows]
    systems = ("continuous", "static", "peer")
    assert turns == [(system, str(repeat)) for repeat in range(3) for system in systems]
    asked = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    longest = asked[-1][1]
    assert asked == [(5, 2), *[(5, longest)] * 3]
    useful = rows[2]["value"] * 2.0  # the peer's tokens a second times its seconds
    assert 5 * 3 <= useful <= 5 * longest <= 5 * 8
    assert useful == int(useful)
    medians = {
        system: statistics.median(row["value"] for row in rows if row["system"] == system)
        for system in systems
    }
    *_, ours, static, theirs = (line.split() for line in done.out.splitlines())
    for line, system in ((ours, "continuous"), (static, "static"), (theirs, "peer")):
        assert line[0] == system
        assert float(line[1]) == pytest.approx(medians[system], abs=0.06)
        ratio = medians["continuous"] / medians[system]
        assert float(line[4].rstrip("x")) == pytest.approx(ratio, rel=0.01, abs=0.006)
    # The same tokens, paged and dense, in batches and not.
    assert [line[5:] for line in (ours, static, theirs)] == [
        ["5", "of", "5"],
        ["5", "of", "5"],
        ["0", "of", "5"],
    ]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--cache=dense",), "--cache: continuous batching is compared paged"),
        (("--shortest=9",), "--shortest: expected at most"),
        (("--pool_slots=16",), "pool_slots: static batching reserves 32 slots"),
        (("--peer_python=/nothing",), "--peer_python=/nothing: No such file"),
    ],
)
@pytest.mark.usefixtures("small")
def test_wrong_flags_are_one_line(tmp_path: Path, arguments: tuple, part: str) -> None:
    one_line(run("--model=x", *SMALL, f"--out={tmp_path / 'out'}", *arguments), part)
