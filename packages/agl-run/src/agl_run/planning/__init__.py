"""Plans a run from recorded rollouts: the size and time of a step, silent groups, and faults of the recordings."""
