"""Experiments: their configuration, the trainer that runs them, and what a person sees of it."""
