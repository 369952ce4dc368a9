"""``experiments.serve``: the same files from both paths, and one line for what is wrong."""

from __future__ import annotations

import csv
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from experiments import generate, serve, serve_figures, serve_systems
from paged_jax.measure import results
from paged_jax.serving.llm import LLM
from tests.support import models
from tests.support.commands import call, one_line

run = functools.partial(call, serve)

SMALL = ("--block_size=4", "--pool_slots=44", "--max_length=48", "--rows=6", "--step_tokens=8")
# The longest one is left out, the third can never be held.
LENGTHS = ((3, 4), (5, 2), (30, 18), (9, 1), (40, 20), (2, 6))
WRITTEN = {"rows.csv", "run.json", "requests.csv", "steps.csv"}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--model`` is a model of 61 tokens, whatever it says."""
    loaded = models.tiny()
    monkeypatch.setattr(
        generate,
        "load_model",
        lambda: LLM(loaded, **dataclasses.asdict(generate.engine_config())),
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{prompt},{output}" for prompt, output in LENGTHS]
    path.write_text("\n".join(("num_prefill_tokens,num_decode_tokens", *lines)) + "\n")
    return path


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(("--rate=40,80",), marks=pytest.mark.slow),
        ("--rate=40,80", "--simulate", "--device=h200"),
    ],
    ids=["engine", "simulated"],
)
@pytest.mark.usefixtures("tiny")
def test_both_paths_write_the_same_files(trace: Path, tmp_path: Path, system: tuple) -> None:
    out = tmp_path / "out"
    done = run("--model=tiny", f"--trace={trace}", *SMALL, *system, f"--out={out}")
    assert done.code == 0, done.err
    assert {path.name for path in out.iterdir()} == {
        *WRITTEN,
        *("latency.png", "timeline_40.0.png", "timeline_80.0.png"),
    }
    assert "1 of 6 requests left out: more than 48 tokens" in done.out
    assert "1 refused, the first is request 2: pool_slots: 30 prompt and 1 x 18" in done.out
    assert "rate 80.0: 5/5" in done.err
    requests = table(out / "requests.csv")
    assert [row["request"] for row in requests] == ["0", "1", "2", "3", "5"] * 2
    for row in requests:
        lengths = int(row["prompt_tokens"]), int(row["output_tokens"])
        assert lengths == LENGTHS[int(row["request"])]
        if row["request"] == "2":
            assert (row["start_seconds"], row["finish_seconds"]) == ("", "")
            assert row["error"].startswith("pool_slots: ")
            continue
        arrival, start, first, finish = (
            float(row[f"{name}_seconds"]) for name in ("arrival", "start", "first_token", "finish")
        )
        assert 0 <= arrival <= start < first <= finish
        latency = float(row["normalised_latency"]) * lengths[1]
        assert latency == pytest.approx(finish - arrival)
        assert row["error"] == ""
    _check_rows(out, requests)


def _check_rows(out: Path, requests: list[dict[str, str]]) -> None:
    """The metrics of every rate follow from its requests and steps."""
    steps = table(out / "steps.csv")
    for rate in ("40.0", "80.0"):
        values = {row["metric"]: row["value"] for row in results.read(out) if row["rate"] == rate}
        served = [row for row in requests if row["rate"] == rate and not row["error"]]
        moments = [row for row in steps if row["rate"] == rate]
        tokens = sum(int(row["output_tokens"]) for row in served)
        seconds = max(float(row["finish_seconds"]) for row in served)
        latencies = [float(row["normalised_latency"]) for row in served]
        running = [int(row["running"]) for row in moments]
        assert values["served"] == 4
        assert values["refused"] == 1
        assert values["output_tokens_per_second"] == pytest.approx(tokens / seconds)
        assert values["normalised_latency_mean"] == pytest.approx(sum(latencies) / 4)
        assert values["steps"] == len(moments)
        assert values["running_mean"] == pytest.approx(sum(running) / len(running))
        assert max(float(row["used_fraction"]) for row in moments) <= 1


@pytest.mark.usefixtures("tiny")
def test_the_traces_own_times(tmp_path: Path) -> None:
    """Without a rate; a replay trace tells steps, whose seconds have to be given."""
    trace, out = tmp_path / "replay.csv", tmp_path / "out"
    trace.write_text("arrival_iter,prompt_len,output_len\n2,3,4\n2,30,20\n12,8,2\n")
    common = ("--model=tiny", f"--trace={trace}", *SMALL, "--simulate", "--device=h200")
    one_line(run(*common, f"--out={out}"), "step_seconds: the trace's times are steps")
    scaled = ("--step_seconds=0.5", "--prompt_scale=0.5", "--output_scale=0.25", "--limit=2")
    done = run(*common, *scaled, f"--out={out}")
    assert done.code == 0, done.err
    requests = table(out / "requests.csv")
    assert [row["arrival_seconds"] for row in requests] == ["0.0", "0.0"]
    assert [row["prompt_tokens"] for row in requests] == ["2", "15"]
    assert [row["output_tokens"] for row in requests] == ["1", "5"]
    assert {row["rate"] for row in results.read(out)} == {"trace"}
    assert not (out / "latency.png").exists()
    one_line(run(*common, *scaled, f"--out={out}"), out, "exists: take another --out")
    drawn = (out / "timeline_trace.png").read_bytes()
    (out / "timeline_trace.png").unlink()
    again = call(serve_figures, f"--out={out}")
    assert (again.code, again.out) == (0, f"{out / 'timeline_trace.png'}\n")
    assert (out / "timeline_trace.png").read_bytes() == drawn
    (out / "steps.csv").write_text("rate,seconds\n")
    one_line(
        call(serve_figures, f"--out={out}"), out / "steps.csv", "expected rate,seconds,running"
    )


@pytest.mark.usefixtures("tiny")
def test_static_batching_is_slower(trace: Path, tmp_path: Path) -> None:
    seconds = {}
    for scheduler in ("continuous", "static"):
        out = tmp_path / scheduler
        done = run(
            *("--model=tiny", f"--trace={trace}", "--simulate", "--device=a100_40gb"),
            *("--pool_slots=96", "--block_size=4", "--max_length=48", "--rows=6"),
            *(f"--scheduler={scheduler}", "--step_tokens=64", f"--out={out}"),
        )
        assert done.code == 0, done.err
        rows = {row["metric"]: row["value"] for row in results.read(out)}
        seconds[scheduler] = rows["seconds"]
        assert rows["served"] == 5
    assert seconds["static"] > seconds["continuous"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--rate=0",), "--rate: expected numbers from"),
        (("--rate=1,x",), "--rate: expected numbers from"),
        (("--rate=inf",), "--rate: expected numbers from"),
        (("--rate=2,2",), "--rate: "),
        (("--prompt_scale=2",), "prompt_scale: expected above 0 to 1, got 2"),
        (("--step_seconds=1",), "step_seconds: no time of the trace is a step"),
        (("--max_length=4",), "max_length: each of 6 requests has more than 4 tokens"),
        (("--scheduler=static", "--cache=paged"), "--cache: static batching reserves whole rows"),
        (("--scheduler=static", "--pool_slots=8"), "pool_slots: static batching reserves 48"),
        (("--cache=dense", "--prefix_caching"), "prefix_caching: a dense cache"),
        (("--device=moon",), "--device: expected one of a100_40gb"),
        (("--device=",), "--device: "),
        (("--nosimulate",), "--device: the engine runs here"),
        (("--limit=0",), "limit"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_wrong_flags_are_one_line(trace: Path, tmp_path: Path, arguments: tuple, part: str) -> None:
    common = ("--model=tiny", f"--trace={trace}", *SMALL, "--simulate", "--device=h200")
    one_line(run(*common, f"--out={tmp_path / 'out'}", *arguments), part)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("tiny")
def test_a_trace_is_needed(tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'out'}"
    one_line(run("--model=tiny", out), "--trace: expected a file of requests")
    one_line(run("--model=tiny", f"--trace={tmp_path / 'gone'}", out), tmp_path / "gone")
    one_line(run("--model=tiny", "--trace=x", "--simulate", out), "x")


class Interrupted:
    """The system of the flags, interrupted in its run of the given number."""

    def __init__(self, number: int) -> None:
        self.number, self.runs = number, 0

    def __call__(self) -> Any:
        system = from_flags_as_ever()
        run_as_ever = system.run

        def run(*given: Any) -> Any:
            self.runs += 1
            if self.runs == self.number:
                raise KeyboardInterrupt
            return run_as_ever(*given)

        system.run = run  # type: ignore[assignment, method-assign]
        return system


from_flags_as_ever = serve_systems.from_flags


@pytest.mark.usefixtures("tiny")
def test_an_interrupt_leaves_whole_rates(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    flags = ("--model=tiny", f"--trace={trace}", *SMALL, "--simulate", "--device=h200")
    for number, rates in ((1, []), (2, ["40.0"])):
        monkeypatch.setattr(serve_systems, "from_flags", Interrupted(number))
        done = run(*flags, "--rate=40,80", f"--out={out}")
        assert (done.code, done.err.splitlines()[-1]) == (130, "interrupted")
        assert out.exists() == bool(rates)
    assert {path.name for path in out.iterdir()} == WRITTEN
    assert {row["rate"] for row in results.read(out)} == {"40.0"}
    for name in ("requests.csv", "steps.csv"):
        assert {row["rate"] for row in table(out / name)} == {"40.0"}


@pytest.mark.usefixtures("tiny")
def test_files_of_a_run_that_never_finished_do_not_add_up(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "requests.csv").write_text("of another run\n")
    flags = ("--model=tiny", f"--trace={trace}", *SMALL, "--simulate", "--device=h200")
    assert run(*flags, "--rate=40", f"--out={out}").code == 0
    assert [row["request"] for row in table(out / "requests.csv")] == ["0", "1", "2", "3", "5"]


@pytest.mark.usefixtures("tiny")
def test_ten_thousand_wait(tmp_path: Path) -> None:
    """All there at once: each is served, one way or the other."""
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    trace.write_text("prompt_len,output_len\n" + "3,2\n40,8\n" * 5000)
    flags = ("--model=tiny", f"--trace={trace}", *SMALL, "--simulate", "--device=h200")
    done = run(*flags, "--pool_slots=40", f"--out={out}")
    assert done.code == 0, done.err
    values = {row["metric"]: row["value"] for row in results.read(out)}
    assert (values["served"], values["refused"]) == (5000, 5000)
    assert "5000 refused, the first is request 1: pool_slots: 40 prompt" in done.out
