"""Checks of an experiment that run before its first rollout."""
