"""What produced a run's rows: flags, versions, device, seeds, git revision.

The record holds nothing that differs between two runs of the same thing on the same machine, no
clock and no process id, so ``results`` can demand that a resumed run matches it.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

import paged_jax


def describe(flags: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """The record for ``run.json``, in JSON's types.

    ``flags`` are those that decide the rows: where they go and whether the run resumes are not
    among them. ``git_revision`` is the commit of the working tree that paged_jax was imported
    from, with ``-modified`` after it when tracked files differ, None outside a repository.
    """
    return {
        "flags": dict(flags),
        "seeds": list(seeds),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "paged_jax": paged_jax.__version__,
        },
        "device": {
            "platform": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
        },
        "git_revision": git_revision(Path(paged_jax.__file__).parents[1]),
    }


def git_revision(folder: Path) -> str | None:
    """The commit of the repository whose root is ``folder``, or None where it is none.

    A folder further down is none either: an installed package may lie inside someone else's.
    """
    root = _git(folder, "rev-parse", "--show-toplevel")
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    if root is None or revision is None or Path(root).resolve() != folder.resolve():
        return None
    modified = _git(folder, "status", "--short", "--untracked-files=no")
    return f"{revision}-modified" if modified else revision


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True)
    except FileNotFoundError:  # no git on this machine
        return None
    return done.stdout.strip() if done.returncode == 0 else None
