"""Settings of the sweep that answers the paper's memory questions."""

WORKLOADS = ("sharegpt", "alpaca")
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARING = (0.0, 0.25, 0.5, 0.75, 1.0)
# One and five translation examples before each prompt: PagedAttention, Figure 16.
PREFIX_TOKENS = (80, 341)
SEEDS = 8
STEPS = 30_000
WARMUP_STEPS = 3_000
