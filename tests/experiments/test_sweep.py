"""The sweep as a user runs it: rows, resuming after a kill, real traces, and wrong input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from experiments import cells, plan, sources, summary
from paged_jax.measure import results
from paged_jax.workload import Workload, lengths

TINY = ("--pool_slots=4096", "--steps=300", "--warmup_steps=50", "--seeds=2")


def sweep(*arguments, **options):
    command = [sys.executable, "-m", "experiments.sweep", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def fails(done, *words):
    """The command ended with one line that has the words, and exit code 1."""
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if not line.startswith("cells:")]
    assert len(errors) == 1, done.stderr
    for word in words:
        assert word in errors[0]
    return True


def test_rows_fractions_and_figures(tmp_path):
    out = tmp_path / "out"
    done = sweep(
        *TINY, "--workloads=alpaca,zipf", "--block_sizes=16,20", "--sharing=0,0.5", f"--out={out}"
    )
    assert done.returncode == 0, done.stderr
    rows = results.read(out)
    assert len({tuple(row[f] for f in plan.FACTORS) for row in rows}) == 2 * 2 * 2 * (5 + 2)
    values: dict[tuple, dict[str, float]] = {}
    for row in rows:
        key = tuple(row[factor] for factor in plan.FACTORS)
        values.setdefault(key, {})[row["metric"]] = row["value"]
        if row["unit"] == "of pool" and row["metric"] != "saved_fraction":
            assert 0 <= row["value"] <= 1
    for key, metrics in values.items():
        _, allocator, block_size, sharing, pool_slots, _ = key
        categories = ("token", "reserved", "internal", "external", "cached", "free")
        assert sum(metrics[f"{name}_fraction"] for name in categories) == pytest.approx(1)
        lost = ("round_up", "stranded", "short")
        assert metrics["external_fraction"] == pytest.approx(
            sum(metrics[f"{name}_fraction"] for name in lost)
        )
        if allocator == "paged":
            remainder = int(pool_slots) % int(block_size) / int(pool_slots)
            assert metrics["fragmented_fraction"] == pytest.approx(remainder, abs=0)
            assert (metrics["sharing_saving"] > 0) == (float(sharing) > 0)
            waste = 1 - values[(key[0], "orca_max", "-", *key[3:])]["token_fraction"]
            gain = (waste - (1 - metrics["token_fraction"])) / waste
            assert metrics["reclaimed_fraction_orca_max"] == pytest.approx(gain)
        else:
            assert metrics["sharing_saving"] == metrics["preemptions"] == 0
    drawn = {path.name for path in out.glob("*.png")}
    assert drawn == {"waste_breakdown.png", "block_size.png", "sharing.png", "running.png"}
    assert "paged 16" in done.stdout
    assert "±" in done.stdout
    record = json.loads((out / "run.json").read_text())
    assert record["seeds"] == [0, 1]
    assert record["flags"]["steps"] == 300


@pytest.mark.parametrize("signal_name", ["SIGINT", pytest.param("SIGKILL", marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path, signal_name):
    arguments = (
        *("--workloads=alpaca", "--allocators=orca_max,paged", "--block_sizes=1", "--sharing=0"),
        *("--seeds=12", "--steps=4000", "--pool_slots=8192"),
    )
    out, whole = tmp_path / "out", tmp_path / "whole"
    command = [sys.executable, "-m", "experiments.sweep", *arguments, f"--out={out}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        rows = out / "rows.csv"
        while process.poll() is None and not (rows.exists() and rows.stat().st_size > 3_000):
            time.sleep(0.005)
        os.kill(process.pid, getattr(signal, signal_name))
        errors = process.communicate()[1].decode()
    assert process.returncode == (130 if signal_name == "SIGINT" else -signal.SIGKILL), errors
    finished = rows.read_text().count(",steps,")
    assert 0 < finished < 24
    assert fails(sweep(*arguments, f"--out={out}"), "--resume")
    assert fails(sweep(*arguments, "--watermark=0.1", f"--out={out}", "--resume"), "watermark")
    done = sweep(*arguments, f"--out={out}", "--resume")
    assert done.returncode == 0, done.stderr
    assert sweep(*arguments, f"--out={whole}").returncode == 0
    for name in ("rows.csv", "run.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_wrong_input_is_one_line_and_leaves_nothing(tmp_path):
    truncated = tmp_path / "truncated.csv"
    truncated.write_text("prompt_len,output_len\n12,3\n14\n")
    out = f"--out={tmp_path / 'out'}"
    trace = "--workloads=trace"
    assert fails(sweep("--block_size=16", out), "block_size")
    assert fails(sweep("--block_sizes=16,0", out), "--block_sizes", "whole numbers from 1")
    assert fails(sweep(trace, "--trace=absent.csv", out), "absent.csv", "No such file")
    assert fails(sweep(trace, f"--trace={truncated}", out), "truncated.csv:3", "output_len")
    assert fails(sweep(*TINY[1:], "--pool_slots=1500", out), "orca_max", "--pool_slots")
    assert not (tmp_path / "out").exists()


def test_wrong_choices_are_named(tmp_path):
    out = f"--out={tmp_path / 'out'}"
    assert fails(sweep("--allocators=paged,slab", out), "slab", "first_fit_oracle")
    assert fails(sweep("--workloads=trace", out), "--trace=FILE")
    assert fails(sweep("--sharing=1.5", out), "--sharing", "0.0 to 1.0")
    assert fails(sweep("--arrivals=trace", out), "--arrivals", "--workloads=trace")
    assert fails(sweep("--rate=0.5", out), "--rate", "no effect", "saturated")
    assert fails(sweep("--block_sizes=16", "--pool_slots=15", out), "--block_sizes", "1 to 15")
    assert fails(
        sweep(*TINY, "--allocators=paged", "--samples=4", "--max_rows=2", out),
        "4 samples",
        "--max_rows",
    )


def test_a_real_trace_with_its_own_arrivals(shared_data, tmp_path):
    trace = shared_data("azure_llm_2023/AzureLLMInferenceTrace_conv.csv")
    done = sweep(
        *("--workloads=trace", f"--trace={trace}", "--arrivals=trace", "--step_seconds=0.02"),
        *("--pool_slots=65536", "--sharing=0", "--seeds=1", "--block_sizes=16"),
        *("--allocators=first_fit_oracle,paged", f"--out={tmp_path / 'out'}"),
    )
    assert done.returncode == 0, done.stderr
    values = {
        (row["allocator"], row["metric"]): row["value"] for row in results.read(tmp_path / "out")
    }
    for allocator in ("first_fit_oracle", "paged"):  # the whole trace: 3,502 s in steps of 20 ms
        assert values[allocator, "finished"] == 19_366
        assert values[allocator, "steps"] > 3_502 / 0.02
    assert 0 < values["paged", "free_fraction"] < 1
    assert values["paged", "running_mean"] > 0


def test_a_trace_s_longest_request_is_what_max_reserves(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_len,output_len\n20,12\n30,2\n")
    common = ("--workloads=trace", f"--trace={trace}", "--allocators=first_fit_max", *TINY[1:])
    for sharing, promise in (("0", 32), ("0,0.5", 32 + 341)):
        out = tmp_path / f"out{promise}"
        done = sweep(*common, f"--sharing={sharing}", "--pool_slots=8000", f"--out={out}")
        assert done.returncode == 0, done.stderr
        running = {row["value"] for row in results.read(out) if row["metric"] == "running_mean"}
        assert running == {8000 // promise}


def test_requests_that_run_out_are_doubled(monkeypatch):
    settings = plan.Settings(
        workloads={"alpaca": Workload(law=lengths.alpaca(), max_length=2048)},
        allocators=("orca_oracle", "paged"),
        block_sizes=(1, 16),
        sharing=(0.0,),
        pool_slots=(2048,),
        seeds=1,
        steps=400,
        warmup_steps=0,
    )
    (group,) = settings.groups()
    wanted, bounds = set(settings.cells()), sources.bounds_of(settings)
    enough = dict(cells.run_group(settings, group, wanted, bounds, threading.Event()))
    counts = []

    def requests_of(settings, group, count, draw=sources.requests_of):
        counts.append(count)
        return draw(settings, group, count)

    monkeypatch.setattr(sources, "requests_of", requests_of)
    monkeypatch.setattr(sources, "count_needed", lambda settings, group: 5)
    doubled = dict(cells.run_group(settings, group, wanted, bounds, threading.Event()))
    assert counts == [5 * 2**n for n in range(len(counts))]
    assert len(counts) > 3
    for cell, values in enough.items():
        assert {**doubled[cell], "cut": values["cut"]} == values


def test_an_interrupt_anywhere_loses_nothing_and_is_raised(tmp_path, monkeypatch):
    settings = plan.Settings(
        workloads={"alpaca": Workload(law=lengths.alpaca(), max_length=2048)},
        allocators=("paged",),
        block_sizes=(1, 4, 16),
        sharing=(0.0,),
        pool_slots=(2048,),
        seeds=1,
        steps=50,
        warmup_steps=0,
    )

    def run(out, simulate):
        monkeypatch.setattr(cells, "_simulate", simulate)
        table = results.Table.open(
            out,
            factors=plan.FACTORS,
            metrics=settings.metrics(),
            cells=settings.cells(),
            run={},
            resume=True,
        )
        with table:
            cells.run(settings, table)
        return (out / "rows.csv").read_bytes()

    simulate = cells._simulate
    whole = run(tmp_path / "whole", simulate)
    for interrupted_at in (0, 1, 2):
        calls: list[tuple] = []

        def interrupting(source, column, calls=calls, at=interrupted_at):
            if len(calls) == at:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)  # the handler runs in the main thread
            calls.append(column)
            return simulate(source, column)

        out = tmp_path / f"out{interrupted_at}"
        if interrupted_at < 2:
            with pytest.raises(KeyboardInterrupt):
                run(out, interrupting)
            assert len(results.read(out)) == (interrupted_at + 1) * len(settings.metrics())
        else:  # during the last cell: nothing is missing
            assert run(out, interrupting) == whole
        assert run(out, simulate) == whole


def test_summary_prints_means_and_spread():
    rows = [
        {
            **dict(zip(plan.FACTORS, ("alpaca", "paged", "16", "0.0", "64", seed), strict=True)),
            "metric": metric,
            "value": value,
        }
        for seed, value in (("0", 0.25), ("1", 0.35))
        for metric in (
            *("token_fraction", "reserved_fraction", "internal_fraction", "external_fraction"),
            *("fragmented_fraction", "running_mean", "sharing_saving", "preemptions", "finished"),
            "cut",
        )
    ]
    text = summary.text(rows)
    # Half-width of two values: t(1) * sd / sqrt(2) = 12.706 * 7.071 / 1.414.
    assert "30.00 ±63.53" in text
    assert "paged 16" in text
