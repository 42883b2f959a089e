"""Weights on disk: adapters, checkpoints' directories, probes."""
