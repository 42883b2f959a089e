"""The policy plugin `vllm`: servers that are started here or attached to, and weights that are checked."""
