"""What does a smaller type of KV cache cost in exactness, and what does it buy in rows?

    python -m experiments.kv_dtypes --model=smollm2 --text=README.md --out=results/kv_dtypes

Exactness against a bf16 cache (f32 is listed, too): a text is read through each cache, and logits
and likeliest tokens compared at every position. Rows: the same requests are served from the same
number of bytes, scales included, and the sequences that ran at once are counted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from experiments import command, generate
from paged_jax.config import KV_DTYPES, EngineConfig
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.measure import environment, results
from paged_jax.memory import layout
from paged_jax.model.weights import Loaded
from paged_jax.serving import settings
from paged_jax.serving.llm import LLM

FLAGS = flags.FLAGS
BASELINE = "bf16"
DTYPES = (BASELINE, *(dtype for dtype in KV_DTYPES if dtype not in ("auto", BASELINE)))
METRICS = (
    ("logit_error_mean", "1"),
    ("logit_error_max", "1"),
    ("greedy_agreement", "1"),
    ("slot_bytes", "B"),
    ("running_mean", "1"),
)


def define_flags() -> None:
    """The flags of this command."""
    generate.define_model_flags()
    flags.DEFINE_string("text", "README.md", "file whose beginning is read")
    flags.DEFINE_integer("tokens", 256, "of the text", lower_bound=2)
    flags.DEFINE_integer("pool_mib", 4, "bytes of every pool, in MiB", lower_bound=1)
    flags.DEFINE_integer("requests", 48, "that are served, of --prompt_tokens", lower_bound=1)
    flags.DEFINE_integer("prompt_tokens", 64, "of a request", lower_bound=1)
    flags.DEFINE_integer("max_tokens", 16, "of an output", lower_bound=1)
    flags.DEFINE_string("out", "results/kv_dtypes", "folder of the results")


def main(_: list[str]) -> None:
    llm = generate.load_model()
    if llm.tokenizer is None:
        raise ValueError("--model: a text needs a tokenizer")
    ids = llm.tokenizer.encode(Path(FLAGS.text).read_text())[: FLAGS.tokens]
    if len(ids) < FLAGS.tokens:
        raise ValueError(
            f"--text={FLAGS.text}: it has {len(ids)} tokens of --tokens={FLAGS.tokens}"
        )
    deciding = ("model", "dtype", "text", "tokens", "pool_mib", "block_size", "rows", "requests")
    table = results.Table.open(
        FLAGS.out,
        factors=("kv_dtype",),
        metrics=METRICS,
        cells=[(dtype,) for dtype in DTYPES],
        run=environment.describe({name: FLAGS[name].value for name in deciding}, []),
    )
    print(
        f"{'cache':>10}{'|logit error| mean':>20}{'largest':>10}{'same likeliest':>16}"
        f"{'bytes a slot':>14}{'rows at once':>14}"
    )
    exact = read(llm.model, _config(llm, BASELINE), ids)
    with table:
        for dtype in DTYPES:
            config = _config(llm, dtype)
            found = exact if dtype == BASELINE else read(llm.model, config, ids)
            slot_bytes, running = serve(llm, config)
            values = (*compare(exact, found), slot_bytes, running)
            table.append((dtype,), dict(zip((name for name, _ in METRICS), values, strict=True)))
            mean, most, agreement = values[:3]
            print(
                f"{dtype:>10}{mean:>20.5f}{most:>10.4f}{agreement:>15.1%} {slot_bytes:>14,}"
                f"{running:>14.2f}"
            )


def _config(llm: LLM, dtype: str) -> EngineConfig:
    config = dataclasses.replace(llm.config, cache="paged", kv_dtype=dtype)
    return settings.fit_config(config, llm.model)


def read(model: Loaded, config: EngineConfig, ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] of a text, every token's keys and values read from the cache."""
    groups = settings.groups_of(model.config, config).count
    blocks = groups * layout.blocks_of(len(ids), config.block_size)
    config = dataclasses.replace(config, pool_slots=blocks * config.block_size, rows=1)
    graphdef, weights = nnx.split(model.decoder)

    @jax.jit
    def logits(weights: object, token_T: jax.Array) -> jax.Array:
        cache, _ = settings.create_cache(model, config).grow(jnp.array([len(ids)]))
        view, position_T = cache.view(jnp.array([True]), jnp.array([0, len(ids)]), len(ids))
        decoder = nnx.merge(graphdef, weights)
        return decoder.logits(decoder(token_T, position_T, view)[0])

    return np.asarray(logits(weights, jnp.array(ids, jnp.int32)))


def compare(exact_TV: np.ndarray, found_TV: np.ndarray) -> tuple[float, float, float]:
    """Mean and largest absolute difference of logits, and how often the likeliest is the same."""
    error = np.abs(exact_TV - found_TV)
    agreement = float((exact_TV.argmax(-1) == found_TV.argmax(-1)).mean())
    return float(error.mean()), float(error.max()), agreement


def serve(llm: LLM, config: EngineConfig) -> tuple[int, float]:
    """Bytes a slot, and the mean number of sequences at once in a pool of ``--pool_mib``."""
    one_block = settings.create_cache(
        llm.model, dataclasses.replace(config, pool_slots=config.block_size)
    )
    slot_bytes = one_block.kv.slot_bytes
    slots = FLAGS.pool_mib * 2**20 // slot_bytes
    served = LLM(llm.model, **dataclasses.asdict(dataclasses.replace(config, pool_slots=slots)))
    params = SamplingParams(temperature=0, max_tokens=FLAGS.max_tokens, ignore_eos=True)
    random = np.random.default_rng(0)
    shape = (FLAGS.requests, FLAGS.prompt_tokens)
    prompts = random.integers(llm.model.config.vocabulary, size=shape).tolist()
    return slot_bytes, served.generate(prompts, params)[0].memory.running


if __name__ == "__main__":
    command.run(main, define_flags)
