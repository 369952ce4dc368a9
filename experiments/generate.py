"""What does a model say, and what does its cache hold meanwhile?

    python -m experiments.generate --model=PATH --prompt="Once upon a time" --max_tokens=64
    python -m experiments.generate --model=PATH --prompt_ids=1,403 --n=4 --temperature=1 --json

``--model`` is a Hugging Face folder, a ``.gguf`` file, a llama2.c ``.bin``, or ``smollm2``. A
single output streams to the terminal; ``--json`` prints one object a prompt, one a line.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from experiments import command
from paged_jax.config import CACHES, KV_DTYPES, EngineConfig
from paged_jax.decoding.beams import BeamSearchParams
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.serving.llm import LLM
from paged_jax.serving.requests import RequestOutput
from pallas_kernels.ops import BACKENDS

DEMO_MODEL = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")

# Beams are compared, not drawn, and end by the model's own token alone.
SAMPLING_FLAGS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop",
    "seed",
)

FLAGS = flags.FLAGS


def define_flags() -> None:
    """The flags of this command."""
    define_model_flags()
    flags.DEFINE_multi_string("prompt", [], "text to continue; may be given several times")
    flags.DEFINE_multi_string("prompt_ids", [], "token ids to continue, as 1,2,3; several times")
    flags.DEFINE_integer("n", 1, "outputs a prompt, sampled in parallel", lower_bound=1)
    flags.DEFINE_integer("beam_width", 0, "beam search with this many beams; 0: sampling")
    flags.DEFINE_float("length_penalty", 1.0, "of beam search")
    flags.DEFINE_integer("max_tokens", 64, "tokens of an output, most", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0: greedy", lower_bound=0)
    flags.DEFINE_integer("top_k", 0, "likeliest tokens kept, 0: all", lower_bound=0)
    flags.DEFINE_float("top_p", 1.0, "probability kept")
    flags.DEFINE_float("min_p", 0.0, "of the likeliest token's probability, kept")
    flags.DEFINE_float("repetition_penalty", 1.0, "on tokens of prompt and output")
    flags.DEFINE_multi_string("stop", [], "string that ends an output; several times")
    flags.DEFINE_integer("seed", 0, "of the sampling", lower_bound=0)
    flags.DEFINE_bool("ignore_eos", False, "go on past the model's end token")
    flags.DEFINE_bool("json", False, "print one JSON object a prompt")


def define_model_flags() -> None:
    """The flags of a model and its cache."""
    flags.DEFINE_string("model", None, "path of a model, or smollm2", required=True)
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "of weights; default the file's")
    flags.DEFINE_enum("cache", "paged", CACHES, "kind of KV cache")
    flags.DEFINE_integer("block_size", 16, "slots of a block", lower_bound=1)
    flags.DEFINE_integer("pool_slots", 16_384, "slots of the paged cache", lower_bound=1)
    flags.DEFINE_integer("max_length", 2_048, "tokens of a sequence, most", lower_bound=2)
    flags.DEFINE_enum("kv_dtype", "auto", KV_DTYPES, "type of the cache; auto: the model's")
    flags.DEFINE_enum("backend", None, BACKENDS, "of paged attention; default the platform's")
    flags.DEFINE_integer("rows", 32, "sequences that run at once", lower_bound=1)
    flags.DEFINE_list("decode_rows", [], "fewer rows, for which decoding is compiled, too")


def load_model() -> LLM:
    """The model of the flags."""
    settings = dataclasses.asdict(engine_config())
    return LLM(find_model(FLAGS.model), dtype=FLAGS.dtype, **settings)


def engine_config() -> EngineConfig:
    """The engine's settings of the flags."""
    return EngineConfig(
        cache=FLAGS.cache,
        block_size=FLAGS.block_size,
        pool_slots=FLAGS.pool_slots,
        max_length=FLAGS.max_length,
        kv_dtype=FLAGS.kv_dtype,
        backend=FLAGS.backend,
        rows=FLAGS.rows,
        decode_rows=command.numbers("decode_rows", FLAGS.decode_rows, int, low=1)
        if FLAGS.decode_rows
        else (),
    )


def find_model(name: str) -> Path:
    """The path of a model; ``smollm2`` is the demo model. ``ValueError`` where it is not there."""
    if name != "smollm2":
        return Path(name)
    if not DEMO_MODEL.exists():
        raise ValueError(f"--model=smollm2: {DEMO_MODEL} is not there, `make demo-model` brings it")
    return DEMO_MODEL


def main(_: list[str]) -> None:
    prompts = [*FLAGS.prompt, *map(_ids, FLAGS.prompt_ids)]
    if not prompts:
        raise ValueError("--prompt or --prompt_ids: expected at least one")
    _refuse_flags_without_effect()
    llm = load_model()
    if FLAGS.beam_width:
        _print(llm.beam_search(prompts, _beams()))
        return
    params = _sampling()
    if FLAGS.json or len(prompts) > 1 or params.n > 1 or llm.tokenizer is None:
        _print(llm.generate(prompts, params))
        return
    for piece in llm.stream(prompts[0], params):
        if isinstance(piece, str):
            print(piece, end="", flush=True)
    print()


def _refuse_flags_without_effect() -> None:
    """``ValueError`` for a flag that this run would not heed: the user meant another run."""
    unheeded = SAMPLING_FLAGS if FLAGS.beam_width else ("length_penalty",)
    reason = "beam search has no" if FLAGS.beam_width else "without --beam_width there is no"
    for name in unheeded:
        if FLAGS[name].value != FLAGS[name].default:
            raise ValueError(f"--{name}: {reason} {name}, got {FLAGS[name].value}")
    if FLAGS.cache == "dense" and FLAGS.backend:
        raise ValueError(f"--backend: a dense cache has no paged attention, got {FLAGS.backend}")


def _ids(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise ValueError(f"--prompt_ids: expected whole numbers as 1,2,3, got {text!r}") from None


def _beams() -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=FLAGS.beam_width,
        max_tokens=FLAGS.max_tokens,
        length_penalty=FLAGS.length_penalty,
        ignore_eos=FLAGS.ignore_eos,
    )


def _sampling() -> SamplingParams:
    return SamplingParams(
        n=FLAGS.n,
        temperature=FLAGS.temperature,
        top_k=FLAGS.top_k,
        top_p=FLAGS.top_p,
        min_p=FLAGS.min_p,
        repetition_penalty=FLAGS.repetition_penalty,
        max_tokens=FLAGS.max_tokens,
        stop=tuple(FLAGS.stop),
        seed=FLAGS.seed,
        ignore_eos=FLAGS.ignore_eos,
    )


def _print(results: list[RequestOutput]) -> None:
    for result in results:
        if FLAGS.json:
            print(json.dumps(_object(result), ensure_ascii=False))
            continue
        for number, output in enumerate(result.outputs):
            said = " ".join(map(str, output.token_ids)) if output.text is None else output.text
            print(f"[{number}] {said}")


def _object(result: RequestOutput) -> dict[str, object]:
    return {
        "prompt": result.prompt,
        "prompt_ids": list(result.prompt_ids),
        "outputs": [
            {
                "token_ids": list(output.token_ids),
                "text": output.text,
                "cumulative_logprob": output.cumulative_logprob,
                "finish_reason": output.finish_reason,
            }
            for output in result.outputs
        ],
        "memory": dataclasses.asdict(result.memory),
    }


if __name__ == "__main__":
    command.run(main, define_flags)
