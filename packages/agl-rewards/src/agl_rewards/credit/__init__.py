"""Credit assignments for teams of agents: by groups of equal states, by role and turn, and by replays and forks."""
