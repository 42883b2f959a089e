"""A web console over a store of any kind: runs, agents, rollouts, tokens and versions, and actions on them."""

__all__: list[str] = []
