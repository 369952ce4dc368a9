"""Savings of samples and beams against what lengths and lineages say, block by block."""

from __future__ import annotations

import collections
import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from configs.prompts import INSTRUCTIONS
from experiments import forks, sharing
from paged_jax.config import EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.measure import results
from paged_jax.serving import engine
from tests.support import models

PROMPTS = [[3, 14, 15, 9, 26], [5, 1, 8, 30], [35, 8, 9, 7, 9, 3, 2, 38, 46], [17], [50, 21, 4]]
PROMPT_R = np.array(list(map(len, PROMPTS)))
SIZE, MAX_TOKENS, WIDTH = 4, 14, 3
ENDS = (7, 11, 19, 23, 31, 42, 51, 57)  # many, so that requests are done at different times
BEAMS = BeamSearchParams(max_tokens=MAX_TOKENS, early_stopping=True)
CONFIG = sharing.together(
    EngineConfig(block_size=SIZE, pool_slots=1024, max_length=64, rows=15, backend="reference"),
    PROMPTS,
    MAX_TOKENS,
    WIDTH,
)


@pytest.fixture(scope="module")
def model():
    return models.tiny(end_ids=ENDS)


def expected_of_samples(prompt_R, output_RF, size: int) -> forks.Sharing:
    """Full prompt blocks once a request, the others once a sample: no table, no pool."""
    entries = used = copies = 0
    steps = output_RF.max() - 1
    for step in range(1, steps + 1):
        for prompt, output_F in zip(prompt_R, output_RF, strict=True):
            running = int((output_F > step).sum())
            blocks, shared = math.ceil((prompt + step) / size), prompt // size
            entries += running * blocks
            used += running * (blocks - shared) + (shared if running else 0)
            copies += step == 1 and prompt % size > 0 and max(running - 1, 0)
    return forks.Sharing(entries / steps, used / steps, copies)


def expected_of_beams(parent_XB, prompt_R, size: int) -> forks.Beams:
    """A block in use is a different last token in it: beams share it if they descend from that."""
    steps, rows = parent_XB.shape
    width = rows // len(prompt_R)
    text: dict[int, list[tuple]]
    text = {b: [(b // width, i) for i in range(prompt_R[b // width])] for b in range(rows)}
    totals, copies = np.zeros((2, 2)), 0
    for step in range(1, steps):
        live = [b for b in range(rows) if parent_XB[step, b] < rows]
        tails = collections.Counter(text[b][-1] for b in live if len(text[b]) % size)
        copies += sum(tails.values()) - len(tails)
        text = {b: text[b] for b in live}
        written = {b: [*text[b], ("step", step, b)] for b in live}
        for moment, texts in enumerate((text, written)):
            ends = [
                [tokens[min(end, len(tokens)) - 1] for end in range(size, len(tokens) + size, size)]
                for tokens in texts.values()
            ]
            totals[moment] += sum(map(len, ends)), len(set().union(*ends))
        text = {b: written[parent_XB[step, b]] for b in live}
    (entries, used), (writing_entries, writing_used) = totals / (steps - 1)
    return forks.Beams(
        forks.Sharing(entries, used, copies), forks.Sharing(writing_entries, writing_used, copies)
    )


def test_samples_of_a_model_save_what_their_lengths_say(model):
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=1)
    outcome = sharing.parallel(model, CONFIG, PROMPTS, WIDTH, params)
    sharing.demand_equal("samples", outcome)
    serving = engine.Engine(model, CONFIG, samples=WIDTH)
    requests = [serving.add(ids, SamplingParams(n=WIDTH, max_tokens=14, seed=1)) for ids in PROMPTS]
    collections.deque(serving.run(), maxlen=0)
    output_RF = np.array([[len(one.token_ids) for one in r.sequences] for r in requests])
    assert len(set(output_RF.ravel())) > 2, "samples should end at different times"
    expected = expected_of_samples(PROMPT_R, output_RF, SIZE)
    np.testing.assert_allclose(outcome.measured, expected)
    np.testing.assert_allclose(outcome.predicted, expected)
    np.testing.assert_allclose(outcome.by_token, expected_of_samples(PROMPT_R, output_RF, 1))
    assert 0 < outcome.measured.saving < outcome.by_token.saving < 1
    np.testing.assert_array_equal(outcome.output_RF, output_RF)


@pytest.fixture(scope="module")
def parent_XB(model):
    serving = engine.Engine(model, CONFIG, samples=WIDTH)
    parents: list[np.ndarray] = []
    serving.memory.parents = parents
    for prompt_ids in PROMPTS:
        serving.add(prompt_ids, dataclasses.replace(BEAMS, beam_width=WIDTH))
    collections.deque(serving.run(), maxlen=0)
    return np.stack(parents)


def test_beams_of_a_model_save_what_their_lineage_says(model, parent_XB):
    outcome = sharing.beam(model, CONFIG, PROMPTS, WIDTH, BEAMS)
    sharing.demand_equal("beams", outcome)
    steps_R = (parent_XB < WIDTH * len(PROMPTS)).sum(axis=0)[::WIDTH]
    assert len(set(steps_R)) > 1, "some request should be done before the others"
    expected = expected_of_beams(parent_XB, PROMPT_R, SIZE)
    np.testing.assert_allclose(outcome.measured, expected.between)
    np.testing.assert_allclose(outcome.predicted, expected.between)
    np.testing.assert_allclose(outcome.writing, expected.writing)
    np.testing.assert_allclose(outcome.predicted_writing, expected.writing)
    np.testing.assert_allclose(outcome.by_token, expected_of_beams(parent_XB, PROMPT_R, 1).between)
    assert outcome.writing.saving < outcome.measured.saving
    np.testing.assert_array_equal(outcome.output_RF[:, 0], steps_R)


def test_a_wrong_record_is_noticed(parent_XB):
    """Positive controls: a fork that was none, a request that runs a step longer, a lost one."""
    right = forks.of_beams(parent_XB, PROMPT_R, SIZE).between
    rows = parent_XB.shape[1]
    unforked, longer = parent_XB.copy(), parent_XB.copy()
    own = np.arange(rows) // WIDTH * WIDTH
    goes_on_XB = parent_XB[1:] < rows
    forked = np.argwhere((parent_XB[:-1] != np.arange(rows)) & goes_on_XB)[-1]
    unforked[tuple(forked)] = forked[1]
    ended = int(np.argwhere(parent_XB == rows)[0, 0])
    longer[ended] = np.where(parent_XB[ended] == rows, own, parent_XB[ended])
    for wrong in (unforked, longer, parent_XB[:-1]):
        found = forks.of_beams(wrong, PROMPT_R, SIZE).between
        outcome = sharing.Outcome(
            measured=right,
            predicted=found,
            writing=right,
            predicted_writing=right,
            by_token=found,
            prompt_R=PROMPT_R,
            output_RF=PROMPT_R[:, None],
        )
        with pytest.raises(ValueError, match=r"beam 3: measured .* copies, predicted"):
            sharing.demand_equal("beam 3", outcome)


@pytest.mark.parametrize("seed", range(3))
def test_replay_of_random_forks(seed):
    random = np.random.default_rng(seed)
    prompt_R = np.array([7, 1, 4])
    parent_XB = random.integers(0, 4, (24, 12)) + np.arange(12) // 4 * 4
    parent_XB[random.integers(1, 24) :, 4:8] = 12
    found = forks.of_beams(parent_XB.astype(np.int32), prompt_R, 3)
    np.testing.assert_allclose(found, expected_of_beams(parent_XB, prompt_R, 3))


def test_samples_of_any_lengths():
    """Outputs of one token among them, which end before a block is copied."""
    random = np.random.default_rng(0)
    prompt_R, output_RF = random.integers(1, 30, 12), random.integers(1, 9, (12, 3))
    output_RF[:4, 1:] = 1
    for size, found in zip((1, 8), forks.of_samples(prompt_R, output_RF, 1, 8), strict=True):
        np.testing.assert_allclose(found, expected_of_samples(prompt_R, output_RF, size))


def test_weights_are_means_over_decode_steps():
    """Prompts of 1 and 0 full blocks; samples that run 3 and 1 steps: tokens 1, 2, 3 and 1."""
    found = sharing.weights(np.array([5, 3]), np.array([[4], [2]]), 4)
    assert found == (3 / 4, 7 / 4)


def test_refusals_name_the_numbers():
    with pytest.raises(ValueError, match="--rows: 5 prompts of 4 sequences need 20, got 15"):
        sharing.together(CONFIG, PROMPTS, MAX_TOKENS, 4)
    small = EngineConfig(block_size=16, pool_slots=256, rows=15)
    with pytest.raises(ValueError, match=r"--pool_slots: .* may need 960, got 256"):
        sharing.together(small, PROMPTS, 56, WIDTH)
    for nothing in (
        lambda: forks.of_samples(np.array([5]), np.array([[1, 1]]), 4),
        lambda: forks.of_beams(np.zeros((1, 2), np.int32), np.array([5]), 4),
    ):
        with pytest.raises(ValueError, match="outputs: every one ended with its first token"):
            nothing()


def test_instructions_are_short_and_differ():
    words = [len(text.split()) for text in INSTRUCTIONS]
    assert len(set(INSTRUCTIONS)) == len(INSTRUCTIONS) == 24
    assert 10 <= np.mean(words) <= 16
    assert all(text.isascii() for text in INSTRUCTIONS)


def test_figure_shows_a_method_alone_and_a_width_the_paper_lacks(tmp_path):
    out = tmp_path / "out"
    cells = [("beam", 2), ("beam", 3)]
    with results.Table.open(
        out, factors=("method", "width"), metrics=sharing.METRICS, cells=cells, run={}
    ) as table:
        for cell in cells:
            table.append(cell, {name: 0.5 for name, _ in sharing.METRICS})
    path = sharing.draw_figure(out)
    assert path.name == "saved_blocks.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.sharing", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_wrong_flags_are_refused_before_a_model_is_read(tmp_path):
    done = _run("--model=nowhere", "--cache=dense", f"--out={tmp_path / 'out'}")
    assert done.returncode == 1
    assert done.stderr == "error: --cache: a dense cache has no blocks to share, expected paged\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_command_reports_each_method(shared_data, tmp_path):
    model = shared_data("model_stories260k") / "stories260K.bin"
    out = tmp_path / "out"
    done = _run(
        f"--model={model}",
        "--prompts=2",
        "--samples=2",
        "--widths=3",
        "--max_tokens=9",
        f"--out={out}",
    )
    assert done.returncode == 0, done.stderr
    value = {(row["method"], row["metric"]): row["value"] for row in results.read(out)}
    for method in ("parallel", "beam"):
        assert value[method, "measured_saving"] == pytest.approx(value[method, "predicted_saving"])
        assert value[method, "measured_copies"] == value[method, "predicted_copies"]
    assert value["beam", "measured_saving"] > value["beam", "writing_saving"] > 0
    assert "by token" in done.stdout
    assert (out / "saved_blocks.png").exists()
