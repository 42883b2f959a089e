"""Advice on a run from its numbers: suggestions, alerts, differences between runs, and a ranking of parameters."""
