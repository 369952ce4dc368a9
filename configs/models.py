"""Shapes of published models, for sizes and virtual time; weights come with their own config.

All in bfloat16, which is as wide as the float16 that some were published in.
"""

from paged_jax.config import ModelConfig, RotaryConfig

# Zhang et al., OPT (arXiv 2205.01068), Table 1: 40 layers of 5,120 in 40 heads, an MLP of 4 x 5,120
# with biases, tied embedding, 50,272 tokens. OPT has no gate: three matrices of 13,653 are as large
# as its two of 20,480, so bytes and operations are OPT's though the decoder is not.
OPT_13B = ModelConfig(
    vocabulary=50_272,
    width=5_120,
    layers=40,
    query_heads=40,
    kv_heads=40,
    head_width=128,
    mlp_width=13_653,
    max_length=2_048,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied_embedding=True,
    dtype="bfloat16",
)

# config.json of meta-llama/Meta-Llama-3-8B.
LLAMA_3_8B = ModelConfig(
    vocabulary=128_256,
    width=4_096,
    layers=32,
    query_heads=32,
    kv_heads=8,
    head_width=128,
    mlp_width=14_336,
    max_length=8_192,
    rotary=RotaryConfig(theta=500_000.0),
    dtype="bfloat16",
)

# config.json of HuggingFaceTB/SmolLM2-135M-Instruct.
SMOLLM2_135M = ModelConfig(
    vocabulary=49_152,
    width=576,
    layers=30,
    query_heads=9,
    kv_heads=3,
    head_width=64,
    mlp_width=1_536,
    max_length=8_192,
    rotary=RotaryConfig(theta=100_000.0),
    tied_embedding=True,
    dtype="bfloat16",
)

MODELS = {"opt_13b": OPT_13B, "llama_3_8b": LLAMA_3_8B, "smollm2_135m": SMOLLM2_135M}
