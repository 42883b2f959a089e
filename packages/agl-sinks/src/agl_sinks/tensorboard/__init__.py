"""Runs as event files of TensorBoard."""
