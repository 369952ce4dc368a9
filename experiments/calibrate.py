"""Which fractions of a device's peaks do real steps reach, and how well does the roofline fit?

    python -m experiments.calibrate --model=smollm2 --device=h200 --out=results/smollm2_h200
    python -m experiments.calibrate --model=llama_3_8b --device=h200 --measured=results/llama_h200

Times decode and prefill steps here, a cell for each batch size or chunk and context, or reads such
rows with ``--measured``, where ``--model`` may name a shape of ``configs.models``. Two efficiencies
and the launch time are fitted (``roofline_fit``) to three quarters of the rows; the others say how
wrong the fit is, and one that is too wrong is refused. ``device.json`` in the folder ``--out``
holds the calibrated ``DeviceConfig``, for any ``--device``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from absl import flags

from configs.devices import DEVICES
from configs.models import MODELS
from experiments import command, generate, roofline_fit, step_timing
from experiments.step_timing import Cell
from paged_jax.config import DeviceConfig, ModelConfig
from paged_jax.measure import environment, results
from paged_jax.serving import cost_model, settings
from paged_jax.serving.cost_model import StepCounts
from paged_jax.serving.llm import LLM

COUNTS = ("query_tokens", "drawing_rows", "context_tokens", "attended_tokens")
METRIC = "step_seconds"
DEVICE = "device.json"
HELD_OUT = 4  # every fourth row in the order of operations a byte: some of each kind
LEAST_ROWS = 8

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    generate.define_model_flags()
    flags.DEFINE_string(
        "device", None, f"{', '.join(DEVICES)}, or a device.json of this command", required=True
    )
    flags.DEFINE_string("measured", None, "folder with rows.csv of steps that were timed before")
    flags.DEFINE_list("batches", ["1", "4", "16"], "rows of the decode steps to time")
    flags.DEFINE_list("chunks", ["32", "128"], "prompt tokens of the prefill steps to time")
    flags.DEFINE_list("contexts", ["64", "256", "1024"], "tokens stored before a step")
    flags.DEFINE_integer("steps", 7, "decode steps of a timed run", lower_bound=1)
    flags.DEFINE_integer("repeats", 5, "timed runs; the median counts", lower_bound=1)
    flags.DEFINE_float("most_error", 0.25, "mean relative error of rows held out", lower_bound=0)
    flags.DEFINE_string("out", "results/calibrate", "folder of the results")


def find_device(name: str) -> DeviceConfig:
    """A device of ``configs.devices``, or what a ``device.json`` holds."""
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".json"):
        raise ValueError(
            f"--device: expected one of {', '.join(DEVICES)}, or a .json file, got {name!r}"
        )
    text = Path(name).read_text()
    try:
        return DeviceConfig(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: not a device: {error}") from None


def main(_: list[str]) -> None:
    device = find_device(FLAGS.device)
    for name in ("cache", "rows", "pool_slots", "max_length"):
        if FLAGS[name].value != FLAGS[name].default:
            raise ValueError(f"--{name}: cells have their own, got {FLAGS[name].value}")
    if FLAGS.measured:
        counts, seconds_X = read(FLAGS.measured)
        model = MODELS.get(FLAGS.model) or generate.load_model().model.config
        model = dataclasses.replace(model, dtype=FLAGS.dtype or model.dtype)
    else:
        llm = generate.load_model()
        model = llm.model.config
        counts, seconds_X = measure(llm)
    calibrated = calibrate(model, device, counts, seconds_X)
    out = Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / DEVICE).write_text(json.dumps(dataclasses.asdict(calibrated), indent=2) + "\n")
    print(f"written: {out / DEVICE}")


def measure(llm: LLM) -> tuple[StepCounts, np.ndarray]:
    """Times the cells of the flags here, writes their rows, and returns what ``read`` would."""
    contexts = command.numbers("contexts", FLAGS.contexts, int, low=0)
    batches = command.numbers("batches", FLAGS.batches, int, low=1)
    chunks = command.numbers("chunks", FLAGS.chunks, int, low=1)
    cells = [Cell(rows=rows, stored=stored) for rows in batches for stored in contexts]
    cells += [Cell(chunk=chunk, stored=stored) for chunk in chunks for stored in contexts]
    deciding = ("model", "dtype", "kv_dtype", "block_size", "backend", "steps", "repeats")
    run = environment.describe({name: FLAGS[name].value for name in deciding}, [])
    out = Path(FLAGS.out)
    if (out / results.ROWS).exists():
        raise ValueError(f"{out / results.ROWS} exists: take another --out, or --measured={out}")
    found = step_timing.measure(
        llm.model,
        settings.fit_config(llm.config, llm.model),
        cells,
        decode_steps=FLAGS.steps,
        repeats=FLAGS.repeats,
    )
    keys = [tuple(getattr(counts, name) for name in COUNTS) for counts, _ in found]
    with results.Table.open(
        out, factors=COUNTS, metrics=[(METRIC, "s")], cells=keys, run=run
    ) as table:
        for key, (_, step_seconds) in zip(keys, found, strict=True):
            table.append(key, {METRIC: step_seconds})
    return read(out)


def read(path: str | Path) -> tuple[StepCounts, np.ndarray]:
    """Counts and seconds of measured steps, arrays in the order of their rows.

    Raises ``ValueError`` for rows without a column, or whose counts contradict each other.
    """
    folder = Path(path).parent if Path(path).name == results.ROWS else Path(path)
    rows = [row for row in results.read(folder) if row["metric"] == METRIC]
    missing = [name for name in COUNTS if not all(name in row for row in rows)]
    if not rows or missing:
        raise ValueError(
            f"{folder / results.ROWS}: expected the columns {', '.join(COUNTS)} and the metric"
            f" {METRIC}, it has no {missing[0] if missing else METRIC}"
        )
    try:
        count_XC = np.array([[float(row[name]) for name in COUNTS] for row in rows])
    except ValueError as error:
        raise ValueError(f"{folder / results.ROWS}: {error}") from None
    seconds_X = np.array([row["value"] for row in rows])
    # A query draws at most once and sees itself; what is read is seen by one query at least.
    rising_XC = count_XC[:, [1, 0, 2, 3]]
    wrong_X = (np.diff(rising_XC) < 0).any(axis=1) | (count_XC[:, 0] < 1) | ~(seconds_X > 0)
    if wrong_X.any():
        row = int(wrong_X.argmax())
        raise ValueError(
            f"{folder / results.ROWS} row {row + 1}: expected drawing_rows <= query_tokens <="
            f" context_tokens <= attended_tokens and seconds above 0, got"
            f" {', '.join(f'{count:g}' for count in rising_XC[row])} and {seconds_X[row]:g}"
        )
    return StepCounts(**dict(zip(COUNTS, count_XC.T, strict=True))), seconds_X


def calibrate(
    model: ModelConfig, device: DeviceConfig, counts: StepCounts, seconds_X: np.ndarray
) -> DeviceConfig:
    """The device fitted to three quarters of the rows; prints how well it predicts the others.

    Raises ``ValueError`` for too few rows, and for a fit that is off by more than ``--most_error``.
    """
    if len(seconds_X) < LEAST_ROWS:
        raise ValueError(f"rows: expected at least {LEAST_ROWS} steps, got {len(seconds_X)}")
    bytes_X = np.asarray(cost_model.step_bytes(model, counts, FLAGS.kv_dtype))
    flops_X = np.asarray(cost_model.step_flops(model, counts))
    held_X = np.zeros(len(seconds_X), bool)
    held_X[np.argsort(flops_X / bytes_X, kind="stable")[1::HELD_OUT]] = True
    fit = roofline_fit.fit(device, bytes_X[~held_X], flops_X[~held_X], seconds_X[~held_X])
    predicted_X = roofline_fit.seconds(fit.device, bytes_X, flops_X)
    error_X = predicted_X / seconds_X - 1
    _report(fit, counts, seconds_X, error_X, held_X)
    mean = float(np.abs(error_X[held_X]).mean())
    if not mean <= FLAGS.most_error:
        raise ValueError(
            f"--most_error: the fit is off by {mean:.0%} on average on the rows held out, above"
            f" {FLAGS.most_error:.0%}: expected steps of {device.name} and of the model, each count"
            " in its own column"
        )
    return fit.device


def _report(
    fit: roofline_fit.Fit,
    counts: StepCounts,
    seconds_X: np.ndarray,
    error_X: np.ndarray,
    held_X: np.ndarray,
) -> None:
    device = fit.device
    for name, efficiency, bound in (
        ("bandwidth_efficiency", device.bandwidth_efficiency, fit.memory_bound),
        ("flops_efficiency", device.flops_efficiency, fit.compute_bound),
    ):
        known = f"from {bound} rows" if bound else "kept: no row is bound by it"
        print(f"{name:<22}{efficiency:>10.4f}  {known}")
    print(f"{'launch_seconds':<22}{device.launch_seconds:>10.6f}")
    print(f"\n{'queries':>9}{'context':>10}{'measured ms':>13}{'fitted ms':>11}{'error':>8}")
    query_X, context_X = np.asarray(counts.query_tokens), np.asarray(counts.context_tokens)
    for row in np.lexsort((context_X, query_X)):
        measured = 1e3 * seconds_X[row]
        print(
            f"{query_X[row]:>9.0f}{context_X[row]:>10.0f}"
            f"{measured:>13.3f}{measured * (1 + error_X[row]):>11.3f}{error_X[row]:>8.1%}"
            f"{'  held out' if held_X[row] else ''}"
        )
    for label, chosen_X in (("fitted", ~held_X), ("held out", held_X)):
        size_X = np.abs(error_X[chosen_X])
        print(
            f"{len(size_X)} rows {label}: off by {size_X.mean():.1%} on average,"
            f" {size_X.max():.1%} at most"
        )


if __name__ == "__main__":
    command.run(main, define_flags)
