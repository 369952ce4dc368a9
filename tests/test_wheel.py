"""The wheel is complete: a tiny sweep runs from it in a fresh environment, in another folder.

The fresh environment takes third-party packages from the one that runs the tests, through one
path line, so nothing is downloaded; it does not see an editable installation of this project,
whose own path lines are not followed from there.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("pallas_kernels", "paged_jax", "configs", "experiments")
SWEEP = [
    "--workloads=alpaca",
    "--allocators=paged",
    "--block_sizes=16",
    "--sharing=0",
    "--pool_slots=4096",
    "--seeds=1",
    "--steps=200",
    "--warmup_steps=50",
    "--out=answer",
]


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed and sees no modules of this process."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: setuptools leaves build folders beside them."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in SHIPPED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", out, source, cwd=out)
    (path,) = out.glob("paged_jax-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment that holds the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    fresh = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", fresh, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages/paged_jax")
    lines = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages.parent / "third_party.pth").write_text("\n".join(lines))
    return fresh


def test_wheel_holds_every_module_and_all_data(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    modules = {path for name in SHIPPED for path in (ROOT / name).rglob("*.py")}
    histograms = set((ROOT / "paged_jax" / "workload" / "data").glob("*.json"))
    tuned = set((ROOT / "pallas_kernels" / "tuned").glob("*.json"))
    assert histograms
    expected = {path.relative_to(ROOT).as_posix() for path in modules | histograms | tuned}
    assert {name for name in packed if ".dist-info/" not in name} == expected


def test_tiny_sweep_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    where = run(python, "-c", "import paged_jax; print(paged_jax.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    run(python, "-m", "experiments.sweep", *SWEEP, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["answer"]
    with (tmp_path / "answer" / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["workload"] for row in rows} == {"alpaca"}
    assert (tmp_path / "answer" / "run.json").exists()
