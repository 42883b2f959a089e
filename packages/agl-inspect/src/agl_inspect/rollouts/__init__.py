"""Reading one rollout: why each call trained or did not, its conversation, its answers, its tallies."""
