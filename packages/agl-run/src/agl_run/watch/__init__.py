"""Observers of rollouts and steps: failures, missing calls, sampling parameters, patterns that match no agent."""
