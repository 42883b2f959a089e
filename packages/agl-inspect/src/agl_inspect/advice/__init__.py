"""Gives advice on a run from its numbers: suggestions, alerts, differences between runs, a ranking of parameters."""
