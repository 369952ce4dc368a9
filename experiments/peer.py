"""A peer to compare with: ``peer_program`` under another interpreter, asked through a pipe.

Our own environment needs neither torch nor transformers; ``--peer_python`` names one that has both.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("peer_program.py")


class Peer:
    """A running peer with a model loaded; a context manager that ends it.

    ``versions`` says what answers. Raises ``ValueError`` where the interpreter does not run or
    cannot load the model.
    """

    def __init__(self, python: str, model: Path) -> None:
        try:
            self._process = subprocess.Popen(
                [python, str(PROGRAM), str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ValueError(f"--peer_python={python}: {error.strerror}") from None
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            self.versions = self._read()["peer"]
            undo.pop_all()

    def generate(
        self, prompts: Sequence[Sequence[int]], tokens: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds, and ``tokens`` greedy tokens of every prompt, in one padded batch."""
        assert self._process.stdin is not None, "it was opened as a pipe"
        asked = {"prompts": [list(prompt) for prompt in prompts], "tokens": tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._read()
        return answer["seconds"], answer["token_ids"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened as a pipe"
        line = self._process.stdout.readline()
        if not line:
            _, said = self._process.communicate()
            last = said.strip().rpartition("\n")[2]
            raise ValueError(f"--peer_python: it ended with {self._process.returncode}: {last}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"--peer_python: {answer['error']}")
        return answer

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
