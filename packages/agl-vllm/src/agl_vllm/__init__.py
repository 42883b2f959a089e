"""The policy plugin `vllm`: starts vLLM servers or attaches to running ones, and checks their weights after updates."""
