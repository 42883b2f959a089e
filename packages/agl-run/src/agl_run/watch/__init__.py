"""Watches over rollouts and steps: failures, disagreement, sampling, patterns without agents."""
