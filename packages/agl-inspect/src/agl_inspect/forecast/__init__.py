"""Forecasts: the size of rollouts, waiting, memory and time on a device, faults of the data."""
