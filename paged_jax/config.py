"""Settings as frozen values: hashable, checked when they are made, each a single argument."""

from __future__ import annotations

import dataclasses
import math

MOST = 2**30  # sizes, times and lengths stay below: their sums fit 32 bits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """A KV-cache pool and how it is handed out. Raises ``ValueError`` for sizes that do not go.

    ``block_size`` concerns paged memory alone; ``max_length``, the longest prompt plus output that
    a model takes, concerns contiguous memory alone.
    """

    pool_slots: int  # tokens whose keys and values the pool has room for
    block_size: int = 16  # slots of a block
    max_length: int = 2048  # tokens

    def __post_init__(self) -> None:
        _demand_sizes(self)

    @property
    def blocks(self) -> int:
        """Whole blocks of the pool."""
        return self.pool_slots // self.block_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Sizes of a compiled simulation's arrays: one program serves every run that they hold.

    Paged memory uses ``blocks`` and ``block_size``, contiguous memory ``slots``.
    """

    requests: int
    output: int  # tokens of the longest output
    blocks: int
    block_size: int
    slots: int

    def __post_init__(self) -> None:
        _demand_sizes(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary position embedding (Su et al., arXiv 2104.09864) and how it reaches longer contexts.

    ``scaling``: "none"; "linear" (positions divided by the factor; Chen et al., arXiv 2306.15595);
    "ntk" (a larger theta); "yarn" (Peng et al., arXiv 2309.00071); "llama3" (low frequencies
    divided by the factor, high ones kept, a ramp between; Llama 3 herd, arXiv 2407.21783).
    """

    theta: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    original_length: int = 0  # context before scaling, tokens: yarn, llama3
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: turns over the original context above which nothing changes
    beta_slow: float = 1.0  # yarn: turns below which positions are divided by the factor
    attention_factor: float | None = None  # yarn: multiplies queries and keys; None: its formula

    def __post_init__(self) -> None:
        if self.scaling not in ROTARY_SCALINGS:
            raise ValueError(
                f"scaling: expected one of {', '.join(ROTARY_SCALINGS)}, got {self.scaling!r}"
            )
        if not (self.theta > 1 and self.factor >= 1):
            raise ValueError(
                "theta, factor: expected theta above 1 and a factor of at least 1,"
                f" got {self.theta} and {self.factor}"
            )
        if self.scaling in ("yarn", "llama3") and self.original_length < 1:
            raise ValueError(f"original_length: {self.scaling} needs the context before scaling")


ROTARY_SCALINGS = ("none", "linear", "ntk", "yarn", "llama3")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family. Raises ``ValueError`` for values that do not go together."""

    vocabulary: int
    width: int  # of the residual stream
    layers: int
    query_heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    max_length: int  # tokens of the longest context
    norm_epsilon: float = 1e-5
    norm_offset: float = 0.0  # 1 where a norm scales by 1 + weight (Gemma)
    activation: str = "silu"
    rotary: RotaryConfig = RotaryConfig()
    local_rotary: RotaryConfig | None = None  # of windowed layers, where it differs (Gemma 3)
    windows: tuple[int | None, ...] = ()  # visible tokens of each layer; () = every layer sees all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # a norm after attention and after the MLP, too (Gemma 2)
    tied_embedding: bool = False
    attention_scale: float | None = None  # None: head_width ** -0.5
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    dtype: str = "float32"  # of weights and activations: float32 or bfloat16

    def __post_init__(self) -> None:
        for name in (
            "vocabulary",
            "width",
            "layers",
            "query_heads",
            "kv_heads",
            "head_width",
            "mlp_width",
            "max_length",
        ):
            _demand_size(name, getattr(self, name))
        for window in {*self.windows} - {None}:
            _demand_size("windows", window)
        for name in ("norm_epsilon", "attention_scale", "attention_soft_cap", "logit_soft_cap"):
            _demand_positive(name, getattr(self, name))
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"query_heads: expected a multiple of kv_heads = {self.kv_heads},"
                f" got {self.query_heads}"
            )
        if self.head_width % 2:
            raise ValueError(f"head_width: rotary needs an even one, got {self.head_width}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(
                f"windows: expected one a layer, {self.layers}, got {len(self.windows)}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation: expected one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype: expected float32 or bfloat16, got {self.dtype!r}")

    def window(self, layer: int) -> int | None:
        """Tokens that a layer's query sees, its own included; None for all."""
        return self.windows[layer] if self.windows else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a decoder is trained. Raises ``ValueError`` for values that do not go."""

    steps: int
    rows: int = 16  # texts of a microbatch
    length: int = 256  # tokens of a text
    accumulate: int = 1  # microbatches of a step
    peak_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "length", "accumulate"):
            _demand_size(name, getattr(self, name))
        if not (0 <= self.warmup_steps < MOST and 0 <= self.weight_decay < math.inf):
            raise ValueError("warmup_steps, weight_decay: expected at least 0")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: expected 32 bits without a sign, got {self.seed}")
        if not (0 < self.peak_rate < math.inf and self.clip_norm > 0):
            raise ValueError("peak_rate, clip_norm: expected above 0")


CACHES = ("paged", "dense")
KV_DTYPES = ("auto", "f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine stores and batches. Raises ``ValueError`` for values that do not go."""

    cache: str = "paged"  # or "dense": a contiguous row of max_length slots a sequence
    block_size: int = 16  # slots of a block
    pool_slots: int = 16_384  # of all sequences together, paged: a token takes one a cache group
    max_length: int = 2_048  # tokens of one sequence, prompt and output
    rows: int = 32  # sequences that run at once
    step_tokens: int = 256  # tokens of one step, most: what decodes comes first, then prompts
    chunked_prefill: bool = True  # whether prompts are cut to fit that
    prefix_caching: bool = False  # full blocks are kept and found again; paged
    swap_slots: int | None = None  # of host memory, for the preempted; None: they recompute
    swap_sequences: int = 1  # requests with fewer recompute all the same
    dispatch_steps: int = 32  # decode steps between two looks by the host, most
    decode_rows: tuple[int, ...] = ()  # fewer rows, for which decoding is compiled, too
    kv_dtype: str = "auto"  # "auto": the model's
    backend: str | None = None  # of paged attention; None: the platform's
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.cache not in CACHES:
            raise ValueError(f"cache: expected one of {', '.join(CACHES)}, got {self.cache!r}")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(
                f"kv_dtype: expected one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}"
            )
        if self.cache == "dense":
            self._check_dense()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or (field.type == "int | None" and value is not None):
                _demand_size(field.name, value)
        for name in ("pool_slots", "swap_slots"):
            slots = getattr(self, name)
            if slots is not None and slots < self.block_size:
                raise ValueError(f"{name}: {slots} is less than one block of {self.block_size}")
        if not all(isinstance(few, int) and 1 <= few < self.rows for few in self.decode_rows):
            raise ValueError(
                f"decode_rows: expected whole numbers from 1 and below rows, {self.rows}, got"
                f" {self.decode_rows}"
            )

    def _check_dense(self) -> None:
        if self.kv_dtype not in ("auto", "f32", "bf16"):
            raise ValueError(f"kv_dtype: a dense cache is f32 or bf16, got {self.kv_dtype!r}")
        if self.prefix_caching:
            raise ValueError("prefix_caching: a dense cache has no blocks to find")
        if self.swap_slots is not None:
            raise ValueError("swap_slots: rows of a dense cache are not swapped")

    @property
    def blocks(self) -> int:
        """Whole blocks of the pool."""
        return self.pool_slots // self.block_size

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        """Row counts for which decoding is compiled, ascending."""
        return *sorted(set(self.decode_rows)), self.rows

    @property
    def swap_blocks(self) -> int:
        """Whole blocks of host memory; 0 for none."""
        return (self.swap_slots or 0) // self.block_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """What bounds a step on one device. Raises ``ValueError`` for values that do not go.

    Efficiencies are the fractions of the peaks that whole steps reach: 1 until they are calibrated.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float  # bytes a second
    flops: float  # dense matrix products: multiplications and additions a second, bf16
    host_bandwidth: float  # bytes a second to or from host memory, one way
    bandwidth_efficiency: float = 1.0
    flops_efficiency: float = 1.0
    launch_seconds: float = 0.0  # of a step, whatever it does

    def __post_init__(self) -> None:
        if not isinstance(self.memory_bytes, int) or not self.memory_bytes > 0:
            raise ValueError(
                f"memory_bytes: expected a whole number above 0, got {self.memory_bytes!r}"
            )
        for name in ("memory_bandwidth", "flops", "host_bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected above 0, got {getattr(self, name)!r}")
        for name in ("bandwidth_efficiency", "flops_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected above 0 to 1, got {getattr(self, name)!r}")
        if not 0 <= self.launch_seconds < math.inf:
            raise ValueError(f"launch_seconds: expected at least 0, got {self.launch_seconds!r}")


def _demand_sizes(config: PoolConfig | Bounds) -> None:
    for field in dataclasses.fields(config):
        _demand_size(field.name, getattr(config, field.name))


def _demand_positive(name: str, value: object) -> None:
    """Accepts None, too: what a model does not have."""
    if not (value is None or (isinstance(value, int | float) and 0 < value < math.inf)):
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")


def _demand_size(name: str, value: object) -> None:
    if not isinstance(value, int) or not 1 <= value < MOST:
        raise ValueError(f"{name}: expected a whole number from 1 and below {MOST}, got {value!r}")
