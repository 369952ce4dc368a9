"""How well does a small decoder learn a text, byte by byte?

    python -m experiments.train --steps=2000 --out=results/train
    python -m experiments.generate --model=results/train/model --prompt="def " --temperature=0.8

Trains on ``--text`` (a file, or a folder's ``.py``, ``.md`` and ``.txt`` files; default: the
standard library's sources), holding back the last twentieth. Writes rows and a figure of the loss,
and a checkpoint every ``--save_every`` steps, from which ``--resume`` goes on to the same bits.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import command, figures
from paged_jax.config import ModelConfig, TrainConfig
from paged_jax.measure import environment, progress, results
from paged_jax.model import training
from paged_jax.model.weights import checkpoint

BYTES = 256
EVALUATED_ROWS = 64
SUFFIXES = (".py", ".md", ".txt")
DECIDING = (
    "text",
    "steps",
    "save_every",
    "layers",
    "width",
    "query_heads",
    "kv_heads",
    "max_length",
    "dtype",
    "rows",
    "length",
    "accumulate",
    "peak_rate",
    "warmup_steps",
    "seed",
)

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    flags.DEFINE_string("text", None, "file or folder to learn; default the standard library")
    flags.DEFINE_string("out", "results/train", "folder of rows, figure and model")
    flags.DEFINE_bool("resume", False, "go on from the newest checkpoint in --out")
    flags.DEFINE_integer("steps", 1000, "optimizer steps", lower_bound=1)
    flags.DEFINE_integer("save_every", 100, "steps between checkpoints", lower_bound=1)
    flags.DEFINE_integer("keep", 3, "checkpoints kept", lower_bound=1)
    flags.DEFINE_integer("layers", 4, "layers of the decoder", lower_bound=1)
    flags.DEFINE_integer("width", 256, "width of the decoder", lower_bound=2)
    flags.DEFINE_integer("query_heads", 8, "query heads", lower_bound=1)
    flags.DEFINE_integer("kv_heads", 4, "key/value heads", lower_bound=1)
    flags.DEFINE_integer("max_length", 1024, "context of the model, tokens", lower_bound=2)
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "of the computation")
    flags.DEFINE_integer("rows", 8, "texts of a microbatch", lower_bound=1)
    flags.DEFINE_integer("length", 256, "tokens of a text", lower_bound=2)
    flags.DEFINE_integer("accumulate", 1, "microbatches of a step", lower_bound=1)
    flags.DEFINE_float("peak_rate", 1e-3, "learning rate after the warm-up")
    flags.DEFINE_integer("warmup_steps", 100, "steps of the warm-up", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "of weights and batches", lower_bound=0)


def main(_: list[str]) -> None:
    model, config = _configs()
    text = read_text(FLAGS.text)
    held_back = len(text) // 20
    if held_back < 2 * (config.length + 1):
        raise ValueError(f"--text: {len(text)} bytes are too few for texts of {config.length}")
    text_N, held_N = jnp.asarray(text[:-held_back]), jnp.asarray(text[-held_back:])
    out = Path(FLAGS.out)
    saves = [*range(FLAGS.save_every, config.steps, FLAGS.save_every), config.steps]
    table = results.Table.open(
        out,
        factors=("step",),
        metrics=[("loss", "nats"), ("held_back_loss", "nats"), ("gradient_norm", "1")],
        cells=[(step,) for step in saves],
        run=environment.describe(_deciding(text), [config.seed]),
        resume=FLAGS.resume,
    )
    folder = out / "model"
    with table, checkpoint.Checkpoints(folder, keep=FLAGS.keep) as checkpoints:
        if checkpoints.latest is not None and (checkpoints.latest,) not in table:
            raise ValueError(f"{folder} holds a run whose rows are not here: take another --out")
        checkpoint.write_config(folder, model)
        graphdef, state = training.create(model, config)
        state = _restored(checkpoints, state)
        begun = int(state.step)
        with progress.Progress(config.steps, "training steps", done=begun) as bar:
            for step in saves:
                if step <= begun:
                    continue
                steps = step - int(state.step)
                state, metrics = training.train(graphdef, state, text_N, steps, config=config)
                values = {name: float(value) for name, value in metrics.items()}
                values["held_back_loss"] = float(
                    training.evaluate(graphdef, state.weights, held_N, config, EVALUATED_ROWS)
                )
                # The row first: a kill in between repeats the step, and its row is there already.
                if (step,) not in table:
                    table.append((step,), values)
                checkpoints.save(step, state.weights, state.optimizer)
                bar.advance(steps)
    draw(out)
    last = next(row for row in results.read(out)[::-1] if row["metric"] == "held_back_loss")
    print(f"{last['value']:.3f} nats a byte on held-back text; model in {folder}")


def _configs() -> tuple[ModelConfig, TrainConfig]:
    if FLAGS.width % (2 * FLAGS.query_heads):
        raise ValueError(
            f"--width: expected a multiple of twice --query_heads, {2 * FLAGS.query_heads},"
            f" got {FLAGS.width}"
        )
    model = ModelConfig(
        vocabulary=BYTES,
        width=FLAGS.width,
        layers=FLAGS.layers,
        query_heads=FLAGS.query_heads,
        kv_heads=FLAGS.kv_heads,
        head_width=FLAGS.width // FLAGS.query_heads,
        mlp_width=-(-FLAGS.width * 8 // 3 // 32) * 32,
        max_length=FLAGS.max_length,
        tied_embedding=True,
        dtype=FLAGS.dtype,
    )
    if FLAGS.length > FLAGS.max_length:
        raise ValueError(f"--length: {FLAGS.length} passes --max_length {FLAGS.max_length}")
    config = TrainConfig(
        steps=FLAGS.steps,
        rows=FLAGS.rows,
        length=FLAGS.length,
        accumulate=FLAGS.accumulate,
        peak_rate=FLAGS.peak_rate,
        warmup_steps=FLAGS.warmup_steps,
        seed=FLAGS.seed,
    )
    return model, config


def read_text(path: str | None) -> np.ndarray:
    """The bytes to learn, uint8. ``ValueError`` where there are none."""
    root = Path(path or sysconfig.get_path("stdlib"))
    if root.is_file():
        found = [root]
    elif root.is_dir():
        found = sorted(
            one
            for one in root.rglob("*")
            if one.suffix in SUFFIXES and one.is_file() and "site-packages" not in one.parts
        )
    else:
        raise ValueError(f"--text: {root}: no such file or folder")
    text = b"\n".join(one.read_bytes() for one in found)
    if not text:
        raise ValueError(f"--text: {root} holds no text ({', '.join(SUFFIXES)})")
    return np.frombuffer(text, np.uint8)


def _deciding(text: np.ndarray) -> dict[str, object]:
    """What decides the rows: flags, and the text itself, which may change under its name."""
    found = {"text_bytes": text.size, "text_crc32": zlib.crc32(text)}
    return {name: FLAGS[name].value for name in DECIDING} | found


def draw(out: Path) -> Path:
    """The loss over steps, as a figure beside the rows; its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = results.read(out)
    figure = Figure(figsize=(figures.COLUMN, 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for metric, label, color, line in (
        ("loss", "training text", figures.BLUE, "-"),
        ("held_back_loss", "held-back text", figures.VERMILION, "--"),
    ):
        points = [(int(row["step"]), row["value"]) for row in rows if row["metric"] == metric]
        axes.plot(*zip(*points, strict=True), line, color=color, label=label)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("loss (nats a byte)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    path = out / "loss.png"
    figure.savefig(path, dpi=200)
    return path


def _restored(
    checkpoints: checkpoint.Checkpoints, state: training.TrainState
) -> training.TrainState:
    """The newest checkpoint's state, or the one given where there is none."""
    step = checkpoints.latest
    if step is None:
        return state
    return training.TrainState(
        checkpoints.restore_weights(step, state.weights),
        checkpoints.restore_optimizer(step, state.optimizer),
        jnp.int32(step),
    )


if __name__ == "__main__":
    command.run(main, define_flags)
