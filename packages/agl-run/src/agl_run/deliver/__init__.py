"""Delivery of rollouts and metrics to other systems during a run."""
