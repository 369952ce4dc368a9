"""``experiments.train``: killed at any moment it goes on to the same bytes; faults are one line."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import generate, train
from paged_jax.model import weights
from paged_jax.model.weights import checkpoint
from tests.support import decoder as definition
from tests.support.commands import call, one_line

TINY = (
    "--steps=6",
    "--save_every=2",
    "--keep=1",
    "--layers=1",
    "--width=16",
    "--query_heads=2",
    "--kv_heads=1",
    "--max_length=32",
    "--length=16",
    "--rows=2",
    "--warmup_steps=2",
    "--peak_rate=0.01",
)

# Runs the command, and kills itself at the n-th time that it opens, makes, renames or removes a
# path that begins with a prefix: an audit hook sees what Orbax's threads do without touching them.
KILLED = """
import os, signal, sys
prefix, left = sys.argv.pop(1), int(sys.argv.pop(1))

def hook(event, arguments):
    global left
    watched = event == "open" or event.startswith(("os.", "shutil."))
    if watched and arguments and str(arguments[0]).startswith(prefix):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
from experiments import command, train
command.run(train.main, train.define_flags)
"""

run = functools.partial(call, train)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(draw.choice(["one", "two", "three", "four"]) for _ in range(400)))
    return path


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = run(f"--text={text}", f"--out={out}", *TINY)
    assert done.code == 0, done.err
    return out


def kill(text: Path, out: Path, prefix: str, times: int) -> None:
    """A run that is killed at the n-th event on a path of the out folder that begins so."""
    arguments = [f"{out.resolve()}/{prefix}", str(times), f"--text={text}", f"--out={out}", *TINY]
    command = [sys.executable, "-c", KILLED, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr


def steps_of(out: Path) -> set[str]:
    """The whole checkpoints of a run."""
    return {path.name for path in (out / "model").iterdir() if path.name.isdigit()}


def array_bytes(out: Path) -> dict[str, bytes]:
    """The bytes of all weights of a run's newest checkpoint."""
    loaded = weights.load(out / "model", dtype="float32")
    arrays = definition.weights_of(loaded.decoder)
    return {name: array.astype(np.float32).tobytes() for name, array in arrays.items()}


def resumes_to(whole: Path, text: Path, out: Path) -> None:
    """Resuming ends in the bytes of the run that nothing interrupted."""
    done = run(f"--text={text}", f"--out={out}", *TINY, "--resume")
    assert done.code == 0, done.err
    assert (out / "rows.csv").read_bytes() == (whole / "rows.csv").read_bytes()
    assert array_bytes(out) == array_bytes(whole)
    assert steps_of(out) == {"6"}


def test_a_kill_in_the_middle_of_a_write(whole: Path, text: Path, tmp_path: Path) -> None:
    """Some files of the second checkpoint are there, others not."""
    kill(text, tmp_path, "model/4", 9)
    (torn,) = (path for path in (tmp_path / "model").iterdir() if path.name.startswith("4"))
    assert any(path.is_file() for path in torn.rglob("*"))
    assert steps_of(tmp_path) == {"2"}
    resumes_to(whole, text, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "times", "left"),
    [
        ("model/2", 3, set()),  # in the first write: nothing to go on from
        ("model/4", 1, {"2"}),  # between writes: the row is there, of its checkpoint nothing
        ("model/4", 4, {"2"}),
        ("model/4", 14, {"2"}),
        ("model/4", 20, {"2"}),
        ("model/6", 1, {"4"}),  # the last row is there, its checkpoint is not
        ("model/6", 12, {"4"}),
        ("loss.png", 1, {"6"}),  # all is done but the figure
    ],
)
def test_kills_elsewhere(
    whole: Path, text: Path, tmp_path: Path, prefix: str, times: int, left: set[str]
) -> None:
    kill(text, tmp_path, prefix, times)
    assert steps_of(tmp_path) >= left
    assert max(steps_of(tmp_path), default="0") == max(left, default="0")
    resumes_to(whole, text, tmp_path)


@pytest.mark.slow
def test_another_seed_gives_other_bytes(whole: Path, text: Path, tmp_path: Path) -> None:
    """What says that the comparison with the uninterrupted run can fail."""
    done = run(f"--text={text}", f"--out={tmp_path}", *TINY, "--seed=1")
    assert done.code == 0, done.err
    assert (tmp_path / "rows.csv").read_bytes() != (whole / "rows.csv").read_bytes()
    assert array_bytes(tmp_path) != array_bytes(whole)


def test_generate_serves_what_was_trained(whole: Path) -> None:
    arguments = (f"--model={whole / 'model'}", "--prompt=tw", "--max_tokens=4", "--json")
    done = call(generate, *arguments, "--dtype=float32")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["prompt_ids"] == list(b"tw")
    loaded = weights.load(whole / "model", dtype="float32")
    arrays = definition.weights_of(loaded.decoder)
    ids = definition.greedy(loaded.config, arrays, list(b"tw"), 4)
    assert found["outputs"][0]["token_ids"] == ids
    assert found["outputs"][0]["text"] == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--text=gone.txt", "gone.txt: no such file"),
        ("--width=18", "--width: expected a multiple of twice --query_heads"),
        ("--kv_heads=3", "kv_heads = 3"),
        ("--length=64", "--length: 64 passes --max_length 32"),
        ("--length=33 --max_length=64", "are too few for texts of 33"),
        ("--peak_rate=nan", "peak_rate"),
        (f"--seed={2**32}", "seed"),
        ("--steps=0", "--steps=0"),
        ("--out=/dev/null/out", "/dev/null/out"),
    ],
)
def test_wrong_flags_are_one_line(tmp_path: Path, flag: str, part: str) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words " * 100)
    out = tmp_path / "out"
    one_line(run(f"--text={short}", f"--out={out}", *TINY, *flag.split()), part)
    assert not out.exists()


def test_runs_are_not_mixed(whole: Path, text: Path, tmp_path: Path) -> None:
    """Another run's rows, checkpoints or text of the same name and size are refused."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    ours = (f"--text={text}", f"--out={out}", *TINY)
    one_line(run(*ours), out / "rows.csv", "--resume")
    one_line(run(*ours, "--resume", "--seed=5"), out)
    content = text.read_bytes()
    try:
        text.write_bytes(content[::-1])
        one_line(run(*ours, "--resume"), out)
    finally:
        text.write_bytes(content)
    for name in ("rows.csv", "run.json"):
        (out / name).unlink()
    for resume in ((), ("--resume",)):
        one_line(run(*ours, *resume), out / "model", "take another --out")
    assert checkpoint.read_config(out / "model").width == 16
    assert steps_of(out) == {"6"}


def test_a_broken_checkpoint_is_one_line(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole / "model", folder)
    serve = functools.partial(call, generate, f"--model={folder}")
    fields = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**fields, "layers": 2}))
    one_line(serve("--prompt=x"), folder, "layers.1.", "is missing")
    (folder / "model.json").write_text(json.dumps({**fields, "mlp_width": 32}))
    one_line(serve("--prompt=x"), folder, "layers.0.mlp.", "expected shape (16, 32)", "(16, 64)")
    (folder / "model.json").write_text(json.dumps(fields))
    for path in (folder / "6" / "weights").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[:-40])
    one_line(serve("--prompt=x"), folder, "checkpoint 6, weights")
    shutil.rmtree(folder / "6")
    one_line(serve("--prompt=x"), folder, "no whole checkpoint")
