"""Drawing tokens: greedy, temperature, top-k, top-p, min-p and a repetition penalty, row by row.

A row's n-th token is drawn with ``fold_in(row's key, n)`` by the Gumbel trick, ``argmax(logit / t +
gumbel)``, so it depends on that row's logits, key and n alone: not on the batch, the block size, or
a preemption in between. Truncations follow the order temperature, top-k, top-p (of what top-k
left; Holtzman et al., arXiv 1904.09751), min-p (of the likeliest; arXiv 2407.01082). Log
probabilities are the model's own, before temperature and truncation.

Cost: O(B * V); with a truncation, a sort of V a row. What nobody in a batch asks for is not
compiled in: ``Uses``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.config import MOST
from pallas_kernels import dims


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn. Raises ``ValueError`` for values that do not go."""

    n: int = 1  # sequences of the request
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # likeliest tokens kept, 0: all
    top_p: float = 1.0  # fewest likeliest tokens kept that hold this probability
    min_p: float = 0.0  # kept: at least this fraction of the likeliest token's probability
    repetition_penalty: float = 1.0  # on tokens of prompt and output (arXiv 1909.05858)
    max_tokens: int = 16
    stop: tuple[str, ...] = ()  # strings that end an output, cut off from it
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end
    ignore_eos: bool = False
    seed: int = 0
    logprobs: bool = False  # each token's log probability with the output

    def __post_init__(self) -> None:
        ranges = {
            "n": (self.n, self.n >= 1, "at least 1"),
            "temperature": (self.temperature, 0 <= self.temperature < math.inf, "at least 0"),
            "top_k": (self.top_k, 0 <= self.top_k < MOST, f"from 0 and below {MOST}"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
            "min_p": (self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (
                self.repetition_penalty,
                0 < self.repetition_penalty < math.inf,
                "above 0",
            ),
            "max_tokens": (self.max_tokens, self.max_tokens >= 1, "at least 1"),
            "seed": (self.seed, 0 <= self.seed < 2**32, "32 bits without a sign"),
        }
        for name, (value, legal, wanted) in ranges.items():
            if not legal:
                raise ValueError(f"{name}: expected {wanted}, got {value}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if "" in self.stop:
            raise ValueError("stop: an empty string would end every output")


@dataclasses.dataclass(frozen=True, slots=True)
class Uses:
    """What a batch's rows ask for: static, so that the rest is not compiled."""

    draws: bool = False  # some row is not greedy
    truncates: bool = False
    penalises: bool = False

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Uses:
        """What these requests ask for together."""
        drawn = [one for one in params if one.temperature > 0]
        return cls(
            draws=bool(drawn),
            truncates=any(one.top_k > 0 or one.top_p < 1 or one.min_p > 0 for one in drawn),
            penalises=any(one.repetition_penalty != 1 for one in params),
        )

    def __or__(self, other: Uses) -> Uses:
        """What two batches ask for together."""
        return Uses(
            draws=self.draws or other.draws,
            truncates=self.truncates or other.truncates,
            penalises=self.penalises or other.penalises,
        )


class Samplers(flax.struct.PyTreeNode):
    """The drawing of each row."""

    key_B: jax.Array  # typed PRNG keys
    temperature_B: jax.Array  # f32
    top_k_B: jax.Array  # i32
    top_p_B: jax.Array  # f32
    min_p_B: jax.Array  # f32
    penalty_B: jax.Array  # f32


def samplers(rows: Sequence[tuple[SamplingParams, int]], bound: int) -> Samplers:
    """Samplers of rows given as (params, which of the request's sequences), padded to ``bound``."""
    padded = [*rows, *[(SamplingParams(temperature=0), 0)] * (bound - len(rows))]
    params = [one for one, _ in padded]
    seeds = np.array([one.seed for one in params], np.uint32)
    index = np.array([index for _, index in padded], np.uint32)

    def each(name: str, dtype: type) -> jax.Array:
        # Not jnp.asarray, which compiles a program for every size.
        return jax.device_put(np.array([getattr(one, name) for one in params], dtype))

    return Samplers(
        key_B=_keys(seeds, index),
        temperature_B=each("temperature", np.float32),
        top_k_B=each("top_k", np.int32),
        top_p_B=each("top_p", np.float32),
        min_p_B=each("min_p", np.float32),
        penalty_B=each("repetition_penalty", np.float32),
    )


@jax.jit
@jax.vmap
def _keys(seed: jax.Array, index: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), index)


def sample(
    logits_BV: jax.Array,
    rows: Samplers,
    nth_B: jax.Array,
    uses: Uses,
    seen_BV: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row.

    Args:
      logits_BV: f32, the model's.
      rows: each row's sampler.
      nth_B: i32, tokens that the row has drawn before.
      uses: what to compile in.
      seen_BV: bool, tokens of each row's prompt and output; needed where a row penalises.

    Returns:
      ``(token_B, logprob_B)``: i32, and f32 under the model's own distribution.
    """
    dims(logits_BV=logits_BV, nth_B=nth_B, temperature_B=rows.temperature_B)
    scores_BV = logits_BV
    if uses.penalises:
        assert seen_BV is not None, "a repetition penalty needs the tokens seen"
        penalty_BV = jnp.where(seen_BV, rows.penalty_B[:, None], 1.0)
        scores_BV = jnp.where(scores_BV > 0, scores_BV / penalty_BV, scores_BV * penalty_BV)
    token_B = jnp.argmax(scores_BV, axis=-1)
    if uses.draws:
        greedy_B = rows.temperature_B == 0
        warm_BV = scores_BV / jnp.where(greedy_B, 1.0, rows.temperature_B)[:, None]
        if uses.truncates:
            warm_BV = jnp.where(warm_BV >= _cutoff(warm_BV, rows)[:, None], warm_BV, -jnp.inf)
        noise_BV = jax.vmap(lambda key, nth: _gumbel(key, nth, logits_BV.shape[1]))(
            rows.key_B, nth_B
        )
        token_B = jnp.where(greedy_B, token_B, jnp.argmax(warm_BV + noise_BV, axis=-1))
    token_B = token_B.astype(jnp.int32)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    return token_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def _gumbel(key: jax.Array, nth: jax.Array, vocabulary: int) -> jax.Array:
    return jax.random.gumbel(jax.random.fold_in(key, nth), (vocabulary,))


def _cutoff(warm_BV: jax.Array, rows: Samplers) -> jax.Array:
    """The lowest score that each row keeps."""
    vocabulary = warm_BV.shape[1]
    falling_BV = -jnp.sort(-warm_BV, axis=-1)
    place_V = jnp.arange(vocabulary)
    most_B = jnp.where(rows.top_k_B > 0, jnp.minimum(rows.top_k_B, vocabulary), vocabulary)
    kept_BV = place_V < most_B[:, None]
    chance_BV = jax.nn.softmax(jnp.where(kept_BV, falling_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(chance_BV, axis=-1) - chance_BV
    # With top_p 1 nothing goes, also where rounding lets the sum reach 1 early.
    kept_BV &= (before_BV < rows.top_p_B[:, None]) | (rows.top_p_B == 1)[:, None]
    kept_BV &= chance_BV >= rows.min_p_B[:, None] * chance_BV[:, :1]
    last_B = jnp.sum(kept_BV, axis=-1) - 1  # what is kept stands first
    return jnp.take_along_axis(falling_BV, last_B[:, None], axis=1)[:, 0]
