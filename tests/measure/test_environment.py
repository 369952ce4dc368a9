"""The record of a run is plain, repeatable and right about git."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jax
import pytest

import paged_jax
from paged_jax.measure import environment


def git(folder: Path, *arguments: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *author, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_record_is_json_and_the_same_twice() -> None:
    record = environment.describe({"steps": 5}, range(3))
    assert json.loads(json.dumps(record)) == record
    assert record == environment.describe({"steps": 5}, range(3))
    assert record["flags"] == {"steps": 5}
    assert record["seeds"] == [0, 1, 2]
    assert set(record["versions"]) == {"python", "jax", "jaxlib", "numpy", "paged_jax"}
    assert record["versions"]["paged_jax"] == paged_jax.__version__
    assert record["device"]["platform"] == jax.default_backend()


def test_git_revision_is_that_of_the_folder_itself(tmp_path: Path) -> None:
    assert environment.git_revision(tmp_path) is None
    git(tmp_path, "init", "--quiet")
    assert environment.git_revision(tmp_path) is None  # no commit yet
    (tmp_path / "file").write_text("1")
    (tmp_path / "inside").mkdir()
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "--message=one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert environment.git_revision(tmp_path) == head
    assert environment.git_revision(tmp_path / "inside") is None
    (tmp_path / "untracked").write_text("1")
    assert environment.git_revision(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert environment.git_revision(tmp_path) == f"{head}-modified"


def test_no_git_is_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_revision(tmp_path) is None
