"""From logits to tokens: sampling, beam search, and the jitted steps that run a model."""
