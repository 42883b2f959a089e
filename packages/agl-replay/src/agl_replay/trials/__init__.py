"""Trials of versions: which are tried, how they run, how they compare."""
