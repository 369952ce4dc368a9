"""How many blocks do parallel samples and beams save with a real model, and is that predictable?

    python -m experiments.sharing --model=smollm2 --chat --out=results/sharing

Serves the instructions of ``configs.prompts``, all at once, and takes what the cache held in every
decode step: 1 - blocks in use / table entries, as in Figure 15 of the PagedAttention paper.
Beside it stands what ``forks`` predicts without a model from the lengths and forks that were
recorded: the same to the block, or the command fails. ``--chat`` puts prompts into ChatML, which
models tuned for it, as smollm2 is, need to come to an end; the default of ``--max_tokens`` holds
outputs near the mean of the paper's Alpaca trace.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from absl import flags

from configs import published
from configs.pools import OPT_13B
from configs.prompts import INSTRUCTIONS
from experiments import command, figures, forks
from experiments.generate import define_model_flags, load_model
from paged_jax.config import EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.measure import environment, progress, results
from paged_jax.memory.layout import blocks_of
from paged_jax.model.weights import Loaded
from paged_jax.serving import engine, settings
from paged_jax.serving.llm import LLM
from paged_jax.serving.requests import MemoryUse
from paged_jax.workload import Workload, draw, lengths

if TYPE_CHECKING:  # matplotlib takes most of a second: only drawing pays for it
    from matplotlib.axes import Axes

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
METRICS = [
    ("measured_saving", "of table entries"),
    ("predicted_saving", "of table entries"),
    ("writing_saving", "of table entries"),
    ("token_saving", "of table entries"),
    ("measured_copies", "blocks"),
    ("predicted_copies", "blocks"),
    ("entries_mean", "blocks"),
    ("prompt_tokens_mean", "tokens"),
    ("output_tokens_mean", "tokens"),
]
DECIDING = (
    "model",
    "dtype",
    "kv_dtype",
    "backend",
    "block_size",
    "max_length",
    "prompts",
    "chat",
    "max_tokens",
    "seed",
)
PAPER = {"parallel": published.FIGURE_15, "beam": published.FIGURE_15_BEAM}
ALPACA_REQUESTS = 2_000

FLAGS = flags.FLAGS

Prompts = list[list[int]]


def define_flags() -> None:
    """The flags of this command."""
    define_model_flags()
    FLAGS.set_default("rows", 6 * len(INSTRUCTIONS))
    FLAGS.set_default("pool_slots", 24_576)
    flags.DEFINE_list("samples", ["2", "4", "6"], "parallel samples of a prompt")
    flags.DEFINE_list("widths", ["2", "4", "6"], "beams of a prompt")
    flags.DEFINE_integer(
        "prompts",
        len(INSTRUCTIONS),
        "how many of the instructions",
        lower_bound=1,
        upper_bound=len(INSTRUCTIONS),
    )
    flags.DEFINE_bool("chat", False, "put prompts into ChatML")
    flags.DEFINE_integer("max_tokens", 64, "tokens of an output, most", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "of the sampling", lower_bound=0)
    flags.DEFINE_string("out", "results/sharing", "folder of the results")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one method came to, as decode steps begin and as they write, which is when beams have
    parted. ``by_token``: predicted for blocks of one slot.
    """

    measured: forks.Sharing
    predicted: forks.Sharing
    writing: forks.Sharing
    predicted_writing: forks.Sharing
    by_token: forks.Sharing
    prompt_R: np.ndarray  # tokens
    output_RF: np.ndarray  # tokens of each sample, or steps of each search

    def row(self) -> dict[str, float]:
        """Its values by ``METRICS``."""
        return {
            "measured_saving": self.measured.saving,
            "predicted_saving": self.predicted.saving,
            "writing_saving": self.writing.saving,
            "token_saving": self.by_token.saving,
            "measured_copies": self.measured.copies,
            "predicted_copies": self.predicted.copies,
            "entries_mean": self.measured.entries,
            "prompt_tokens_mean": float(self.prompt_R.mean()),
            "output_tokens_mean": float(self.output_RF.mean()),
        }


def main(_: list[str]) -> None:
    widths = {
        "parallel": command.numbers("samples", FLAGS.samples, int, low=2),
        "beam": command.numbers("widths", FLAGS.widths, int, low=2),
    }
    cells = [(method, width) for method in PAPER for width in widths[method]]
    if FLAGS.cache != "paged":
        raise ValueError("--cache: a dense cache has no blocks to share, expected paged")
    table = results.Table.open(
        FLAGS.out,
        factors=("method", "width"),
        metrics=METRICS,
        cells=cells,
        run=environment.describe({name: FLAGS[name].value for name in DECIDING}, [FLAGS.seed]),
    )
    methods, outcomes = _methods(), {}
    with table, progress.Progress(len(cells), "methods") as bar:
        llm = load_model()
        _demand_all_seen(llm)
        prompts = _prompts(llm)
        config = together(llm.config, prompts, FLAGS.max_tokens, max(width for _, width in cells))
        for method, width in cells:
            outcome = methods[method](llm.model, config, prompts, width)
            demand_equal(f"{method} {width}", outcome)
            outcomes[method, width] = outcome
            table.append((method, width), outcome.row())
            bar.advance()
    _print(outcomes)
    _print_reasons(outcomes, FLAGS.block_size)
    draw_figure(FLAGS.out)


def _prompts(llm: LLM) -> Prompts:
    if llm.tokenizer is None:
        raise ValueError("--model: it has no tokenizer, so the instructions cannot be read")
    form = CHAT if FLAGS.chat else "{}"
    return [llm.tokenizer.encode(form.format(text)) for text in INSTRUCTIONS[: FLAGS.prompts]]


def _demand_all_seen(llm: LLM) -> None:
    windows = settings.groups_of(llm.model.config, llm.config).windows
    if windows != (None,):
        raise ValueError(
            f"--model: windows of {windows} release blocks, and the prediction knows of none"
        )


def together(config: EngineConfig, prompts: Prompts, max_tokens: int, width: int) -> EngineConfig:
    """Settings with which all prompts begin in one step and every decode step is a snapshot.

    ``ValueError`` where rows or blocks do not go round: then some would begin later.
    """
    if len(prompts) * width > config.rows:
        raise ValueError(
            f"--rows: {len(prompts)} prompts of {width} sequences need {len(prompts) * width},"
            f" got {config.rows}"
        )
    blocks = sum(
        settings.most_blocks(config, (None,), len(ids), max_tokens, width) for ids in prompts
    )
    if blocks > config.blocks:
        raise ValueError(
            f"--pool_slots: {len(prompts)} prompts of {width} x {max_tokens} tokens may need"
            f" {blocks * config.block_size}, got {config.pool_slots}"
        )
    tokens = sum(map(len, prompts))
    return dataclasses.replace(
        config, dispatch_steps=1, step_tokens=max(config.step_tokens, tokens)
    )


def parallel(
    model: Loaded, config: EngineConfig, prompts: Prompts, width: int, params: SamplingParams
) -> Outcome:
    """``width`` samples of each prompt."""
    config = dataclasses.replace(config, rows=len(prompts) * width)
    serving = engine.Engine(model, config, samples=width)
    params = dataclasses.replace(params, n=width)
    requests = [serving.add(prompt_ids, params) for prompt_ids in prompts]
    for _ in serving.run():
        pass
    prompt_R = np.array([len(one.prompt_ids) for one in requests])
    output_RF = np.array([[len(s.token_ids) for s in one.sequences] for one in requests])
    predicted, by_token = forks.of_samples(prompt_R, output_RF, config.block_size, 1)
    measured = _sharing(serving.memory.settle(skip=1))
    return Outcome(
        measured=measured,
        predicted=predicted,
        writing=measured,  # samples fork once: a step's blocks are those it writes to
        predicted_writing=predicted,
        by_token=by_token,
        prompt_R=prompt_R,
        output_RF=output_RF,
    )


def beam(
    model: Loaded, config: EngineConfig, prompts: Prompts, width: int, params: BeamSearchParams
) -> Outcome:
    """Beam search over each prompt; its output's length is that of the search."""
    config = dataclasses.replace(config, rows=len(prompts) * width)
    serving = engine.Engine(model, config, samples=width)
    parents: list[np.ndarray] = []
    serving.memory.parents = parents
    params = dataclasses.replace(params, beam_width=width)
    for prompt_ids in prompts:
        serving.add(prompt_ids, params)
    begun = []  # table entries and blocks in use as each step begins
    while serving.busy:
        table = serving.cache.table
        entries_B = blocks_of(np.asarray(table.length_B), config.block_size)
        begun.append((int(entries_B.sum()), int(table.pool.used)))
        serving.advance()
    entries, used = np.mean(begun[1:], axis=0).tolist()
    writing = _sharing(serving.memory.settle(skip=1))
    parent_XB, prompt_R = np.stack(parents), np.array(list(map(len, prompts)))
    replayed = forks.of_beams(parent_XB, prompt_R, config.block_size)
    return Outcome(
        measured=forks.Sharing(entries, used, writing.copies),
        predicted=replayed.between,
        writing=writing,
        predicted_writing=replayed.writing,
        by_token=forks.of_beams(parent_XB, prompt_R, 1).between,
        prompt_R=prompt_R,
        output_RF=(parent_XB < parent_XB.shape[1]).sum(axis=0)[::width, None],
    )


def _methods() -> dict[str, Callable[[Loaded, EngineConfig, Prompts, int], Outcome]]:
    """The methods with the settings of the flags."""
    sampling = SamplingParams(max_tokens=FLAGS.max_tokens, seed=FLAGS.seed)
    beams = BeamSearchParams(max_tokens=FLAGS.max_tokens)
    return {
        "parallel": functools.partial(parallel, params=sampling),
        "beam": functools.partial(beam, params=beams),
    }


def _sharing(memory: MemoryUse) -> forks.Sharing:
    return forks.Sharing(
        entries=memory.entry_slots / memory.block_size,
        used=(memory.entry_slots - memory.saved_slots) / memory.block_size,
        copies=memory.copies,
    )


def demand_equal(name: str, outcome: Outcome) -> None:
    """Raises ``ValueError`` where the prediction is not what was measured."""
    begun = outcome.measured, outcome.predicted
    for measured, predicted in (begun, (outcome.writing, outcome.predicted_writing)):
        if not all(map(math.isclose, measured, predicted)):
            raise ValueError(
                f"{name}: measured {measured.entries:.3f} entries, {measured.used:.3f} blocks and"
                f" {measured.copies} copies, predicted {predicted.entries:.3f},"
                f" {predicted.used:.3f} and {predicted.copies}"
            )


def _print(outcomes: dict[tuple[str, int], Outcome]) -> None:
    print(f"{'':<12}{'blocks saved, % of table entries':^48}{'copies':^22}{'mean tokens':^18}")
    print(f"{'':<12}{'measured':>10}{'predicted':>11}{'writing':>9}{'by token':>10}", end="")
    print(f"{'paper':>8}{'measured':>11}{'predicted':>11}{'prompt':>9}{'output':>9}")
    for (method, width), one in outcomes.items():
        paper = PAPER[method].get(width)
        told = "" if paper is None else f"{paper:.2f}"
        print(f"{f'{method} {width}':<12}{100 * one.measured.saving:>10.2f}", end="")
        print(f"{100 * one.predicted.saving:>11.2f}{100 * one.writing.saving:>9.2f}", end="")
        print(f"{100 * one.by_token.saving:>10.2f}{told:>8}", end="")
        print(f"{one.measured.copies:>11}{one.predicted.copies:>11}", end="")
        print(f"{one.prompt_R.mean():>9.2f}{one.output_RF.mean():>9.2f}")


def _print_reasons(outcomes: dict[tuple[str, int], Outcome], block_size: int) -> None:
    """What of the distance to the paper has been measured, and what has not."""
    prompt, output = published.ALPACA_TOKENS
    print(f"\nlengths: the paper's trace has prompts of {prompt} tokens and outputs of {output}.")
    for (method, width), one in outcomes.items():
        if method == "parallel":
            trace = draw(_alpaca(width), seed=0, count=ALPACA_REQUESTS)
            (told,) = forks.of_samples(trace.prompt_R, trace.output_RF, block_size)
            here = "{:.2f} full blocks a prompt and {:.1f} output tokens in the mean step".format(
                *weights(one.prompt_R, one.output_RF, block_size)
            )
            there = "{:.2f} and {:.1f}".format(
                *weights(trace.prompt_R, trace.output_RF, block_size)
            )
            print(f"  parallel {width}: {here}, there {there};", end="")
            print(f" with its lengths the simulator saves {100 * told.saving:.2f} %")
    print("block size: blocks of one slot would save what stands under `by token`.")
    print("moment: `measured` counts beams as a step begins, `writing` when they have parted; the")
    print("  paper does not say which. How soon the beams of OPT-13B part is not published either.")


def weights(prompt_R: np.ndarray, output_RF: np.ndarray, block_size: int) -> tuple[float, float]:
    """Full blocks of a prompt, and output tokens that a sample stores, mean over decode steps.

    A sample of o tokens takes o - 1 decode steps, after which it has stored 1, 2, ... o - 1.
    """
    steps_RF = output_RF.astype(np.int64) - 1
    full = (prompt_R[:, None] // block_size * steps_RF).sum() / steps_RF.sum()
    return float(full), float((steps_RF * (steps_RF + 1)).sum() / 2 / steps_RF.sum())


def _alpaca(samples: int) -> Workload:
    return Workload(law=lengths.alpaca(), max_length=OPT_13B.max_length, samples=samples)


def draw_figure(out: str | os.PathLike[str]) -> Path:
    """Savings by method and width beside the paper's, from the rows of ``out``; its path."""
    from matplotlib import style
    from matplotlib.figure import Figure

    rows = results.read(out)
    value = {(row["method"], int(row["width"]), row["metric"]): row["value"] for row in rows}
    shown = [name for name in PAPER if any(method == name for method, *_ in value)]
    with style.context(figures.STYLE, after_reset=True):
        figure = Figure(figsize=(figures.COLUMN, 2.4), layout="constrained")
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for axes, method in zip(panels, shown, strict=True):
            widths = sorted({width for name, width, _ in value if name == method})
            series = {
                metric: [100 * value[method, width, metric] for width in widths]
                for metric in ("measured_saving", "writing_saving", "predicted_saving")
            }
            series["paper"] = [PAPER[method].get(width, math.nan) for width in widths]
            _bars(axes, series)
            axes.set_xticks(range(len(widths)), map(str, widths))
            axes.set_xlabel({"parallel": "parallel samples", "beam": "beam width"}[method])
        panels[0].set_ylabel("Blocks saved (% of table entries)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=2)
        path = Path(out) / "saved_blocks.png"
        figure.savefig(path, dpi=200, metadata={"Software": None})
    return path


def _bars(axes: Axes, series: dict[str, list[float]]) -> None:
    looks = {
        "measured_saving": ("measured", figures.BLUE, ""),
        "writing_saving": ("while a step writes", figures.SKY, "////"),
        "paper": ("paper (OPT-13B)", figures.ORANGE, "...."),
    }
    for place, (name, (label, color, hatch)) in enumerate(looks.items()):
        places = np.arange(len(series[name])) + 0.28 * (place - 1)
        axes.bar(places, series[name], 0.26, label=label, color=color, hatch=hatch, **figures.EDGE)
    places = np.arange(len(series["measured_saving"])) - 0.28
    axes.plot(
        places, series["predicted_saving"], "D", color="black", mfc="white", label="predicted"
    )


if __name__ == "__main__":
    command.run(main, define_flags)
