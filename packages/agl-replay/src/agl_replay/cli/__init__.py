"""The commands that run recorded rollouts again."""
