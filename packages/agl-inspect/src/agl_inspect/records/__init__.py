"""Reads and writes the records of an experiment in the store: states, labels, validations, trials and metrics."""
