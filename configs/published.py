"""Published figures that the simulation is compared with.

Figures 2, 13 and 15 are from "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., SOSP 2023), OPT-13B. ``BLOCK_SIZE_TOKENS`` is no publication but an
independent simulation of the memory side of its Figure 18b, a regression figure of our own.
"""

# Figures 2 and 13, ShareGPT: per cent of the pool, and running requests.
# allocator: (token states, external fragmentation and others, batched requests)
FIGURE_2 = {
    "orca_max": (20.4, 8.9, 7.00),
    "orca_pow2": (26.8, 41.6, 9.81),
    "orca_oracle": (38.2, 36.6, 13.62),
}

# Figure 15, parallel sampling, Alpaca: per cent of blocks saved by sharing, by number of samples.
FIGURE_15 = {2: 6.09, 4: 8.53, 6: 9.79}
# The same for beam search, by beam width: the labels of Figure 15b.
FIGURE_15_BEAM = {2: 37.56, 4: 53.13, 6: 55.16}
# Figure 11, Alpaca: mean tokens of a prompt and of an output.
ALPACA_TOKENS = (19.31, 58.45)

# Token states in per cent of the pool by block size, saturated, watermark 1 %.
BLOCK_SIZE_TOKENS = {
    "sharegpt": {1: 97.7, 16: 96.2, 32: 94.9, 64: 91.6, 128: 85.9, 256: 76.2},
    "alpaca": {1: 98.5, 16: 89.8, 32: 82.5, 64: 69.9, 128: 50.9, 256: 29.9},
}

# Released with the paper's system, though not in the paper: blocks kept free at an admission.
WATERMARK = 0.01
