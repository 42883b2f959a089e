"""Forecasts a run: sizes of rollouts, queueing, memory and time on a device, and faults in recorded rollouts."""
