"""A web console over a store of any kind: runs, agents, groups, rollouts, tokens and versions, for reading only."""

__all__: list[str] = []
