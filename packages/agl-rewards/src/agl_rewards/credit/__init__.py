"""Credit assignments for teams of agents: hierarchical groups, and leave-one-out, Shapley and fork credit by replay."""
