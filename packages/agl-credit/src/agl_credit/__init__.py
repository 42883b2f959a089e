"""Credit assignments for teams of agents: hierarchical groups, leave-one-out and Shapley values by replay."""
