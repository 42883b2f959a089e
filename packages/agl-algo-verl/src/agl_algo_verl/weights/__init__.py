"""Weights on disk: adapters, checkpoint directories, probes."""
