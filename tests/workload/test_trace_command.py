"""The command that describes a trace: its text, and one line and an exit code when it cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import command

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.trace", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_mooncake_is_described(shared_data: Callable[[str], Path]) -> None:
    done = run(f"--trace={shared_data('mooncake_fast25/conversation_trace.jsonl')}")
    assert done.returncode == 0
    assert done.stderr == ""
    for share in ("36.64%  blocks", "37.36%  tokens", "40.94%  mean", "12,031", "3.401 / s"):
        assert share in done.stdout


def test_wrong_file_ends_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("prompt_len,output_len\n3,4\n5")
    done = run(f"--trace={path}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {path}:3: column output_len: expected a value, got the end of the line\n"
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--block=3", "Unknown command line flag 'block'"), ("--trace=/nowhere", "/nowhere: No such")],
)
def test_wrong_flag_or_path_ends_in_one_line(argument: str, message: str) -> None:
    done = run("--trace=x", argument)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (ValueError("two\nlines"), 1, "error: two lines\n"),
        (FileNotFoundError(2, "No such file", "name"), 1, "error: name: No such file\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(
    raised: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(arguments: list[str]) -> None:
        raise raised

    def call(guarded, flags_parser) -> None:
        raise SystemExit(guarded(["program"]))

    monkeypatch.setattr(command.app, "run", call)
    with pytest.raises(SystemExit) as caught:
        command.run(main, lambda: None)
    assert caught.value.code == code
    assert capsys.readouterr().err == text
