"""The decoder of the Llama family, its weights and tokenizers, over a dense or a paged cache."""
