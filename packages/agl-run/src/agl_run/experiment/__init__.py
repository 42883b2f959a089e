"""Experiments: their configuration, the trainer that runs them, and the progress that it shows."""
