"""What ``experiments.serve`` serves with, from its flags: a model behind the engine, or none."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Protocol

from absl import flags

from configs.models import MODELS
from experiments import calibrate, generate
from paged_jax.config import EngineConfig, ModelConfig
from paged_jax.model.weights import Loaded
from paged_jax.serving import settings, trace_run, virtual_run
from paged_jax.serving.engine import Engine
from paged_jax.serving.served import Pulse, Served
from paged_jax.workload import timed
from paged_jax.workload.timed import Timed
from paged_jax.workload.trace import Trace

SCHEDULERS = ("continuous", "static")

FLAGS = flags.FLAGS


class System(Protocol):
    """Something that serves requests."""

    name: str
    config: EngineConfig

    def prepare(self, requests: Timed, trace: Trace) -> None:
        """What is done once, before anything is timed."""
        ...

    def run(self, requests: Timed, watch: Callable[[Pulse], None]) -> Served:
        """Serves requests, which differ from the prepared ones in their times alone."""
        ...


class Live:
    """A real model behind the engine, in wall-clock time."""

    name = "engine"

    def __init__(self) -> None:
        llm = generate.load_model()
        self._model: Loaded = llm.model
        self.config = settings.fit_config(_config(llm.config), llm.model)
        self._prompts: list[list[int]] = []

    def prepare(self, requests: Timed, trace: Trace) -> None:
        self._prompts = _prompts(requests, trace, self._model.config)
        # Programs are kept by shape: every later engine of these settings finds them.
        print("compiling", file=sys.stderr)
        Engine(self._model, self.config).warm(trace_run.params(1))

    def run(self, requests: Timed, watch: Callable[[Pulse], None]) -> Served:
        engine = Engine(self._model, self.config)
        static = FLAGS.scheduler == "static"
        return trace_run.run(engine, requests, self._prompts, static=static, watch=watch)


class Simulated:
    """A shape of a model, in virtual time on a device."""

    name = "simulated"

    def __init__(self) -> None:
        if FLAGS.device is None:
            raise ValueError("--device: --simulate needs the device that time is told in")
        self._device = calibrate.find_device(FLAGS.device)
        shape = MODELS.get(FLAGS.model) or generate.load_model().model.config
        self._model = dataclasses.replace(shape, dtype=FLAGS.dtype or shape.dtype)
        config = _config(generate.engine_config())
        longest = min(config.max_length, self._model.max_length)
        self.config = dataclasses.replace(config, max_length=longest)
        self._sequences: list[list[int]] | None = None

    def prepare(self, requests: Timed, trace: Trace) -> None:
        if self.config.prefix_caching:
            prompts = _prompts(requests, trace, self._model)
            vocabulary = self._model.vocabulary
            outputs = timed.outputs(requests, trace, vocabulary=vocabulary, seed=FLAGS.seed)
            self._sequences = [one + other for one, other in zip(prompts, outputs, strict=True)]

    def run(self, requests: Timed, watch: Callable[[Pulse], None]) -> Served:
        return virtual_run.run(
            self._model,
            self._device,
            self.config,
            requests,
            static=FLAGS.scheduler == "static",
            sequences=self._sequences,
            watch=watch,
        )


def from_flags() -> System:
    """The system of the flags; ``ValueError`` for flags that do not go together."""
    if FLAGS.simulate:
        return Simulated()
    if FLAGS.device is not None:
        raise ValueError("--device: the engine runs here; without --simulate it has no effect")
    return Live()


def _prompts(requests: Timed, trace: Trace, model: ModelConfig) -> list[list[int]]:
    return timed.prompts(
        requests,
        trace,
        vocabulary=model.vocabulary,
        seed=FLAGS.seed,
        prompt_scale=FLAGS.prompt_scale,
    )


def _config(config: EngineConfig) -> EngineConfig:
    """Engine settings with those that only this command has flags for."""
    config = dataclasses.replace(
        config,
        step_tokens=FLAGS.step_tokens,
        chunked_prefill=FLAGS.chunked_prefill,
        prefix_caching=FLAGS.prefix_caching,
        swap_slots=FLAGS.swap_slots,
        swap_sequences=FLAGS.swap_sequences,
        dispatch_steps=FLAGS.dispatch_steps,
    )
    if FLAGS.scheduler != "static":
        return config
    if FLAGS["cache"].present and FLAGS.cache != "dense":
        raise ValueError(f"--cache: static batching reserves whole rows, got {FLAGS.cache}")
    return trace_run.static_config(config)
