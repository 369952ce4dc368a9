"""KV-cache pools of published experiments."""

from paged_jax.config import PoolConfig

# OPT-13B on one A100 40 GB: 12 GB for 800 KiB a token. 984 blocks of 16 slots is the one multiple
# of 16 for which seven reservations of 2,048 slots fill the 91.057 % that the PagedAttention
# paper's Figure 2 draws for Orca (Max).
OPT_13B = PoolConfig(pool_slots=15_744, block_size=16, max_length=2_048)
